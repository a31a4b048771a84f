"""`python -m qerl` is the command `qerl`, for environments whose scripts are not on the path."""

import sys

from qerl.cli import main

sys.exit(main())
