"""Build the wheel and the sdist of the last commit, the same bytes every time: python tools/build_release.py FOLDER.

Only what git has is packed. Every date is the commit's (`SOURCE_DATE_EPOCH`, which wheels follow); the sdist, whose
dates setuptools leaves as they are, is packed once more.
"""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def repacked(sdist: bytes, date: int) -> bytes:
    """Return a .tar.gz with the same files in the order of their names, all of one date and of nobody."""
    packed, plain = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(sdist)) as old, tarfile.open(fileobj=plain, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = date, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=date, filename="") as stream:
        stream.write(plain.getvalue())
    return packed.getvalue()


def build(folder: Path) -> None:
    """Write both files into a folder."""
    date = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": date}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as source:
        archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
        with tarfile.open(fileobj=io.BytesIO(archive)) as content:
            content.extractall(source, filter="data")
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder.resolve()), "."]
        subprocess.run(wheel, cwd=source, env=environment, check=True)
        sdist = [sys.executable, "-c", _SDIST, str(folder.resolve())]
        subprocess.run(sdist, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)
    for file in folder.glob("*.tar.gz"):
        file.write_bytes(repacked(file.read_bytes(), int(date)))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    for built in sorted(Path(sys.argv[1]).iterdir()):
        content = built.read_bytes()
        print(f"{hashlib.sha256(content).hexdigest()}  {built.name}  {len(content) / 1e6:.2f} MB")
