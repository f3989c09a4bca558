"""Compute a hash of the C and Cython sources, by which an outdated compiled extension is found.

An editable installation keeps the extension that was built last; after `git pull`, it possibly does not fit
the Python code. `setup.py` runs this file by its path, so it imports nothing of llmtap.
"""

import hashlib
from pathlib import Path
from typing import Final

_SUFFIXES: Final = (".pyx", ".pxi", ".c", ".h")


def fingerprint(folder: Path) -> str:
    """Return a hash of the sources in `folder`; an empty string if there are none, as in a wheel."""
    digest = hashlib.sha256()
    sources = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    for path in sources:
        content = path.read_bytes()
        digest.update(b"%s %d\n" % (path.name.encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()[:16] if sources else ""
