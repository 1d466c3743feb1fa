"""A certificate and a token for tests of servers that ask for them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOKEN = "correct-horse-battery"


def make_certificate(folder: Path, *addresses: str) -> tuple[Path, Path]:
    """A certificate for localhost and `addresses` that signed itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the package openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost," + ",".join(f"IP:{one}" for one in ("127.0.0.1", *addresses))
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signed itself, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))
