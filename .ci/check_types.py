"""mypy over the installed package, and an assertion that it read every module of the tree; then
over the programs of README and of the quickstart.

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

# Programs of people who type theirs, and of those who do not; not by our settings.
for page, options in (
    ("docs/quickstart.md", ["--strict", "--allow-untyped-defs", "--allow-untyped-calls"]),
    ("README.md", ["--check-untyped-defs"]),
):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    if not blocks:
        sys.exit(f"{page} has no program")
    program = Path(page).with_suffix(".py").name
    Path(program).write_text("\n\n".join(blocks))
    if code := subprocess.run(
        [*command[:3], "--config-file=", *options, program], check=False
    ).returncode:
        sys.exit(code)
