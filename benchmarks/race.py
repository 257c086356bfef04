"""Seconds and updates to target losses: ``gn.GaussNewton`` and its peers, in turns.

``make bench`` sets up all it needs and runs it; by hand, with ``benchmarks/setup-race.sh`` done
once::

    benchmarks/.venv/bin/python benchmarks/race.py --data FOLDER

``--plan`` says how long that takes at most; ``--problems``, ``--runners``, ``--seeds`` and the
seconds make it smaller. Raw results are JSON lines beside the table. What they have is not run
again: a trial of the search, or the race of one problem and seed as a whole; one that was
interrupted begins anew, since its contenders share the moments they ran in. New runners, settings
or budgets make a race anew, and of several results the last one counts.

``docs/race.md`` says how it measures; the parts are in ``benchmarks/race/``.
"""

from race.command import main

if __name__ == "__main__":
    main()
