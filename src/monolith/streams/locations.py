"""What stands in the URLs of brokers, and settings whose values are in files or in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from monolith.errors import ConfigError, InvalidArgumentError, StorageError

__all__ = ["refuse_secrets", "resolved_settings", "without_secrets"]

_SECRET = re.compile(r"password|secret|token|\.pem$|jaas|passphrase", re.IGNORECASE)


def refuse_secrets(url: str) -> None:
    """Raise if a user or password is in a URL: URLs are logged, and kept in checkpoints.

    Example:
        >>> refuse_secrets("redis://localhost/0/clicks")
        >>> refuse_secrets("redis://:abc@localhost/0/clicks")
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: url: names and passwords do not belong into a URL, which is logged and kept; give
        settings such as {'password.file': '/run/secrets/broker'}
    """
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise InvalidArgumentError(
            "url: names and passwords do not belong into a URL, which is logged and kept; give settings such as "
            "{'password.file': '/run/secrets/broker'}"
        )


def resolved_settings(settings: Mapping[str, str] | None) -> dict[str, str]:
    """Return settings with the values that others name: `NAME.file` a file, and `NAME.env` an environment variable.

    Example:
        >>> os.environ["BROKER_PASSWORD"] = "abc"
        >>> resolved_settings({"sasl.username": "me", "sasl.password.env": "BROKER_PASSWORD"})
        {'sasl.username': 'me', 'sasl.password': 'abc'}
    """
    found: dict[str, str] = {}
    for name, value in (settings or {}).items():
        if name.endswith(".file"):
            try:
                found[name.removesuffix(".file")] = Path(value).read_text().rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise StorageError(f"settings[{name!r}]: {value} cannot be read: {error}") from None
        elif name.endswith(".env"):
            if value not in os.environ:
                raise ConfigError(f"settings[{name!r}]: there is no environment variable {value!r}")
            found[name.removesuffix(".env")] = os.environ[value]
        else:
            found[name] = str(value)
    return found


def without_secrets(text: str, settings: Mapping[str, str]) -> str:
    """Return `text`, such as an error of a client library, with the values of secret settings replaced.

    Example:
        >>> without_secrets("wrong password abc", {"sasl.password": "abc"})
        'wrong password ***'
    """
    for name, value in settings.items():
        if value and _SECRET.search(name):
            text = text.replace(value, "***")
    return text
