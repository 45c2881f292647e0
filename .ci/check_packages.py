"""Build the source distribution, and from it the wheel; check both, and install each into a fresh
environment, away from the tree, as users do.

    python .ci/check_packages.py [--release TAG]

leaves them in dist/. With ``--release``, they also have to be fit to publish: of the tag's version,
and with the address of the sources.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CARRIED = ("adjoint_tests", "benchmarks", "docs", "examples")
"""Folders that the source distribution has: with it alone, one can test and build the pages."""
MADE = {"_build", ".asv", "raw"}
"""Folders in them that are not the project's."""
PROGRAM = """
import numpy as np, linop

def main(backend):
    X = linop.TensorSpace((6,), linop.Partition((1,)))
    plan = linop.broadcast(X, linop.Partition((2,))).compile(backend)
    return plan(np.arange(6.0) if backend.worker == 0 else None).sum()

assert linop.launch(main, 2, "threads") == [15, 15]
"""
"""A broadcast on two threads."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command; its output, or the end of this program with it."""
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}exit status {done.returncode}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """The source distribution and the wheel that was built from it, in an empty dist/."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.iterdir():
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (source,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return source, wheel


def check_source(source: Path) -> None:
    """Check that nothing of the folders that are carried was left out."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in CARRIED:
        wanted = {
            file.relative_to(ROOT).as_posix()
            for file in (ROOT / folder).rglob("*")
            if file.suffix in (".py", ".md") and not MADE.intersection(file.parts)
        }
        if not wanted or wanted - names:
            sys.exit(f"{source.name} lacks files of {folder}/: {sorted(wanted - names)[:5]}")


def metadata(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def check_release(facts: Message, tag: str) -> None:
    """Check that a wheel may be published as a tag."""
    if tag != f"v{facts['Version']}":
        sys.exit(f"the tag is {tag}, but the wheel's version is {facts['Version']}")
    links = [link.partition(",")[0] for link in facts.get_all("Project-URL", [])]
    if "Source" not in links:
        sys.exit(f"setup.cfg names no Source among project_urls, only {links}: where is it?")


def check_installed(archive: Path, version: str) -> None:
    """Install an archive into an environment of its own, and use it from another folder."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "venv")
        binaries = home / "venv" / "bin"
        pip = (sys.executable, "-m", "pip", "--python", binaries / "python")
        # Of NumPy and SciPy a part is imported: that is compiled when it is.
        run(*pip, "install", "--quiet", "--no-compile", archive, cwd=home)
        said = run(binaries / "linop", "--version", cwd=home)
        if said.split() != ["linop", version]:
            sys.exit(f"{archive.name} was installed, but linop --version says {said}")
        run(binaries / "linop", "doctor", cwd=home)
        run(binaries / "linop", "explain", "ShapeError", cwd=home)  # a page of docs/
        (home / "program.py").write_text(PROGRAM, encoding="utf-8")
        run(binaries / "python", "program.py", cwd=home)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--release", metavar="TAG", help="check that they may be published as TAG")
    tag = parser.parse_args().release
    source, wheel = build()
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    check_source(source)
    facts = metadata(wheel)
    if tag is not None:
        check_release(facts, tag)
    for archive in (wheel, source):
        check_installed(archive, facts["Version"])
    print(f"{source.name} and {wheel.name} install and run")


if __name__ == "__main__":
    main()
