"""Tokens: the secret that a server requires of its clients."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from monolith.errors import ConfigError, StorageError

__all__ = ["NO_TOKEN", "TOKEN_VARIABLE", "Token", "new_token", "read_secret_file", "read_token", "reveal"]

TOKEN_VARIABLE = "MONOLITH_PS_TOKEN"
"""The environment variable with the token that servers ask for and clients send."""
NO_TOKEN = (
    f"asks for a token, and none or another one was sent; give a command --token-file, or the token in {TOKEN_VARIABLE}, and "
    "Python code token=. Scripts that monolith launch runs have it in RunnerConfig.from_env().client"
)
"""What a server that has refused a client does, and what to do about it."""


def _hide(token: str | SecretStr | None) -> SecretStr | None:
    return SecretStr(token) if isinstance(token, str) else token


Token = Annotated[str | SecretStr | None, AfterValidator(_hide), Field(repr=False, exclude=True)]
"""A token as a field of a config. It may be given as a `str` and is kept as a `SecretStr`, which `reveal` reads. It is not part
of `repr` or `model_dump`."""

_OTHERS = 0o007


def reveal(token: str | SecretStr | None) -> str | None:
    """Return the text of a token, for the code that sends or compares it.

    Example:
        >>> reveal(SecretStr("correct-horse-battery"))
        'correct-horse-battery'
    """
    return token.get_secret_value() if isinstance(token, SecretStr) else token


def new_token() -> str:
    """Draw a token that cannot be guessed.

    Example:
        >>> new_token() == new_token(), len(new_token())
        (False, 43)
    """
    return secrets.token_urlsafe(32)


def read_token(file: Path | None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the token in `file`, or in the environment if there is no file.

    Raises:
        ConfigError: every user of the machine can read the file.
        StorageError: the file cannot be read.
    """
    if file is None:
        return (os.environ if environ is None else environ).get(TOKEN_VARIABLE)
    data = read_secret_file(file, "--token-file")
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"--token-file: expected UTF-8 text in {file}") from None


def read_secret_file(file: Path, option: str) -> bytes:
    """Return the content of a file that only its owner and group may access. Errors name `option`.

    Raises:
        ConfigError: every user of the machine can read or write the file.
        StorageError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            # Of the open file: the path could name another one a moment later.
            mode = os.fstat(opened.fileno()).st_mode
            if mode & _OTHERS:
                raise ConfigError(
                    f"{option}: every user of this machine can access {file} (mode {mode & 0o777:03o}); run chmod 600 {file}"
                )
            return opened.read()
    except OSError as error:
        raise StorageError(f"{option}: cannot read {file}: {error.strerror}") from error
