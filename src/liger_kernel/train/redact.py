"""Remove credentials from everything that a run writes, prints or reports; ``***`` replaces them.

    s3://key:secret@bucket/run?token=abc   ->   s3://***@bucket/run?token=***

Known are the user part of a URL, values beside a secret name (in a query, in JSON or YAML, after
``Bearer``), the forms of ``_FORMS``, and the values of this process's environment variables with a
secret name. A credential of another form, in a variable or a field with another name, is not
recognised. ``UserError`` and ``in_a_line`` use it, and so does every message of the runtime layer.
"""

from __future__ import annotations

import os
import re

MARK = "***"
# Before the @ of a URL: what has no slash in it, or user:password, whose password may have some.
# host:9000/path@version is neither.
_USER = re.compile(r"(?P<scheme>[A-Za-z][\w.+-]*)://(?P<user>[^/?#\s'\"]*|[^/?#\s'\":@]+:(?!\d+/)[^\s'\"]+)@")
# In these URLs a name alone before the @ is an account or a container, without which the address
# makes no sense.
_NAMED = {"abfs", "abfss", "adl", "az", "wasb", "wasbs", "ftp", "hdfs", "sftp", "smb", "ssh"}
_QUERY = re.compile(r"(?i)([?&;#][\w.~-]*(?:key|secret|token|sig|passw|pwd|credential|auth)[\w.~-]*=)[^&;#\s'\"]+")
# A quoted name of JSON or YAML with a quoted value. Tokenizers have names such as "eos_token", so
# `token` needs a prefix.
_FIELD = re.compile(
    r"(?i)(?P<name>(?P<quote>\\*[\"'])"
    r"(?:[\w.-]*(?:passw|passphrase|pwd|secret|credential|(?:api|access|account|private)[_-]?key)[\w.-]*"
    r"|(?:(?:access|api|auth|bearer|hf|id|refresh|session)[_-]?)?token|auth)(?P=quote)\s*:\s*)"
    r"(?P<mark>\\*[\"'])(?:(?!(?P=mark))(?:\\.|.))*(?P=mark)"
)
_FORMS = re.compile(
    # PEM, also if its end is cut off
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^\"']*?(?:-----END [A-Z ]*PRIVATE KEY-----|(?=[\"'])|\Z)"
    # JWT
    r"|\beyJ[\w-]{5,}\.eyJ[\w-]{5,}(?:\.[\w-]*)?"
    # Hugging Face, GitHub, GitLab
    r"|\bhf_[A-Za-z0-9]{30,}|\bgh[a-z]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bgl[a-z]{2,5}-[\w-]{20,}"
    # OpenAI and others, Slack, AWS, Google
    r"|\bsk-[\w-]{20,}|\bxox[a-z]-[\w-]{10,}|\bA[KS]IA[A-Z0-9]{16}\b|\bAIza[\w-]{35}"
)
_BEARER = re.compile(r"(?i)(\b(?:bearer|authorization:\s*\w+)\s+)(?!\*)[\w.~+/-]{16,}=*")

# Parts of names, between _, -, . and capitals; the longer ones also at the end of a part, as in
# PGPASSWORD.
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = re.compile(
    r"(?:pass|pwd|pat|keys?|auth|secrets?|token|creds?|credentials?|netrc)$"
    r"|.*(?:passw(?:or)?d|passphrase|secret|token|apikey|pwd|credentials?)$"
)
# a variable whose name ends in one of these holds no credential itself
_PLACE = {"class", "dir", "file", "name", "path", "ref", "sock", "type"}
_SWITCH = "0 1 true false yes no on off none null enabled disabled required optional"


def secret_name(name: str) -> bool:
    """Whether a variable or field of that name usually holds a credential: HF_TOKEN,
    AWS_SECRET_ACCESS_KEY, PGPASSWORD, DB_PASS, apiKey."""
    parts = [part.lower() for part in _PART.findall(name)]
    return any(map(_SECRET.match, parts)) and parts[-1] not in _PLACE


def holds_credential(name: str, value: str) -> bool:
    """Whether ``value`` has a known form, or is the value of a variable or field with a secret
    name, and no switch or path."""
    return redacted(value) != value or (
        secret_name(name) and not value.startswith(("/", "~")) and value.lower() not in ("", *_SWITCH.split())
    )


def redacted(text: str) -> str:
    """Return ``text`` without credentials."""
    for name, value in os.environ.items():
        # shorter values are words, and paths only name files with credentials
        if len(value) >= 8 and not value.startswith(("/", "~")) and secret_name(name):
            text = text.replace(value, MARK)
    text = _FIELD.sub(rf"\g<name>\g<mark>{MARK}\g<mark>", _BEARER.sub(rf"\1{MARK}", _FORMS.sub(MARK, text)))
    return _QUERY.sub(rf"\1{MARK}", _USER.sub(_without_user, text))


def _without_user(found: re.Match[str]) -> str:
    if ":" not in found["user"] and (found["scheme"].lower() in _NAMED or found["user"] == MARK):
        return found[0]
    return f"{found['scheme']}://{MARK}@"


def in_a_line(error: BaseException, most: int | None = 300) -> str:
    """Return the text of an error in one line of at most that many characters, without
    credentials."""
    return redacted(" ".join(str(error).split()))[:most]
