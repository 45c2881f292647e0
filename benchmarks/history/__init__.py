"""Times over the commits, measured by asv: `benchmarks/README.md` says how.

Cases are those of `benchmarks.planning`; here is only what asv calls. Jobs of ranks are not here:
they import linop from the tree, whatever commit is measured.
"""

import sys
from pathlib import Path

# At the end: linop is to be the one that asv installed, of the commit that it measures.
sys.path.append(str(Path(__file__).resolve().parents[2]))
