#!/bin/sh
# Make benchmarks/.venv: torch, the peers and gaussnewton, for `benchmarks/curvature.py`.
#
# The peers are installed without their dependencies so that none of them can replace torch.
# Where pip would find a CUDA build of torch, point it at a CPU build with pip's own settings
# (PIP_FIND_LINKS, PIP_INDEX_URL). PYTHON names the interpreter to use.
set -eu
cd "$(dirname "$0")"

"${PYTHON:-python3}" -m venv .venv
pip="./.venv/bin/python -m pip --disable-pip-version-check"

$pip install --constraint constraints.txt torch
torch_before=$(./.venv/bin/python -c 'import torch; print(torch.__version__)')

$pip install --constraint constraints.txt --no-deps --requirement requirements-peers.txt
$pip install --constraint constraints.txt --requirement requirements.txt
$pip install --no-deps --editable ..

torch_after=$(./.venv/bin/python -c 'import torch; print(torch.__version__)')
if [ "$torch_before" != "$torch_after" ]; then
    echo "torch changed from $torch_before to $torch_after" >&2
    exit 1
fi
./.venv/bin/python -c 'import backpack, curvlinops, gaussnewton'
echo "ready: torch $torch_after"
