"""mypy over the installed package, and an assertion that it read every module of the tree; then
over README's programs.

Run it from a folder outside the tree: in the tree's root the folder `linop/` hides the installed
package, and mypy reports success on a part of the files.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("linop", "backends", "layers")

command = [sys.executable, "-m", "mypy", "-p", "linop", "--config-file", str(ROOT / "setup.cfg")]
mypy = subprocess.run(command, capture_output=True, text=True, check=False)
print(mypy.stdout + mypy.stderr, end="")

wanted = sum(1 for folder in FOLDERS for _ in (ROOT / folder).rglob("*.py"))
found = re.search(r"(?:checked|found in) (\d+) source files?", mypy.stdout)
checked = int(found[1]) if found else 0
if checked != wanted:
    sys.exit(f"mypy checked {checked} files, but {', '.join(FOLDERS)} hold {wanted}")
if mypy.returncode:
    sys.exit(mypy.returncode)

# README's programs, as strictly as somebody may check their own.
blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
Path("readme_code.py").write_text("\n\n".join(blocks))
command = [sys.executable, "-m", "mypy", "--strict", "readme_code.py"]
sys.exit(subprocess.run(command, check=False).returncode)
