"""Remove credentials from everything that a run writes, prints or reports; ``***`` replaces them.

    s3://key:secret@bucket/run?token=abc   ->   s3://***@bucket/run?token=***

Three forms are known: the user part of a URL, values in a URL or a query with a secret name, and the values of this process's environment variables with
a secret name. ``UserError`` and ``in_a_line`` use it, and so does every message of the runtime layer.
"""

from __future__ import annotations

import os
import re

MARK = "***"
# Before the @ of a URL: what has no slash in it, or user:password, whose password may have some. host:9000/path@version is neither.
_USER = re.compile(r"(?P<scheme>[A-Za-z][\w.+-]*)://(?P<user>[^/?#\s'\"]*|[^/?#\s'\":@]+:(?!\d+/)[^\s'\"]+)@")
# In these URLs a name alone before the @ is an account or a container, without which the address makes no sense.
_NAMED = {"abfs", "abfss", "adl", "az", "wasb", "wasbs", "ftp", "hdfs", "sftp", "smb", "ssh"}
_QUERY = re.compile(r"(?i)([?&;#][\w.~-]*(?:key|secret|token|sig|passw|pwd|credential|auth)[\w.~-]*=)[^&;#\s'\"]+")
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|gh[a-z]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|A[KS]IA[A-Z0-9]{16})\b")
_VARIABLE = re.compile(r"(?i)(?:^|_)(?:token|secret|password|passwd|passphrase|api_?key|access_key(?:_id)?|private_key|account_key|credentials?)$")


def secret_name(name: str) -> bool:
    """Whether an environment variable of that name usually holds a credential: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY."""
    return _VARIABLE.search(name) is not None


def redacted(text: str) -> str:
    """Return ``text`` without credentials."""
    for name, value in os.environ.items():
        if len(value) >= 8 and not value.startswith(("/", "~")) and secret_name(name):  # shorter ones are words; paths name files with credentials
            text = text.replace(value, MARK)
    return _TOKEN.sub(MARK, _QUERY.sub(rf"\1{MARK}", _USER.sub(_without_user, text)))


def _without_user(found: re.Match[str]) -> str:
    if ":" not in found["user"] and (found["scheme"].lower() in _NAMED or found["user"] == MARK):
        return found[0]
    return f"{found['scheme']}://{MARK}@"


def in_a_line(error: BaseException, most: int | None = 300) -> str:
    """Return the text of an error in one line of at most that many characters, without credentials."""
    return redacted(" ".join(str(error).split()))[:most]
