"""``python -m gaussnewton`` is the command ``gaussnewton``."""

import sys

from gaussnewton.cli import main

sys.exit(main())
