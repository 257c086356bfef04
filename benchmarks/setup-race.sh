#!/bin/sh
# Make what `benchmarks/race.py` needs: benchmarks/.venv with torch, gaussnewton and the optimisers
# that come from a package, and benchmarks/.venv-jax with kfac-jax and the JAX that it works with.
#
# The peers are installed without their dependencies so that none of them can replace torch.
# Where pip would find a CUDA build of torch, point it at a CPU build with pip's own settings
# (PIP_FIND_LINKS, PIP_INDEX_URL). PYTHON names the interpreter to use.
set -eu
cd "$(dirname "$0")"

"${PYTHON:-python3}" -m venv .venv
pip="./.venv/bin/python -m pip --disable-pip-version-check"

$pip install --quiet --constraint constraints.txt torch
torch_before=$(./.venv/bin/python -c 'import torch; print(torch.__version__)')

$pip install --quiet --no-deps pytorch-optimizer==4.1.0
$pip install --quiet --constraint constraints.txt --requirement requirements-race.txt
$pip install --quiet --no-deps --editable ..

torch_after=$(./.venv/bin/python -c 'import torch; print(torch.__version__)')
if [ "$torch_before" != "$torch_after" ]; then
    echo "torch changed from $torch_before to $torch_after" >&2
    exit 1
fi
./.venv/bin/python -c 'import gaussnewton, matplotlib, pytorch_optimizer, scipy'

"${PYTHON:-python3}" -m venv .venv-jax
./.venv-jax/bin/python -m pip --disable-pip-version-check install --quiet \
    --requirement requirements-jax.txt
./.venv-jax/bin/python -c 'import kfac_jax'
echo "ready: torch $torch_after, $(./.venv-jax/bin/python -c 'import jax; print("JAX", jax.__version__)')"
