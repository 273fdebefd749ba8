"""Keep API keys out of whatever is returned, logged or stored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MASK = "REDACTED"

# SGLang prints its whole argument list at start-up and echoes it in /server_info, keys included.
_KEY_FIELD = re.compile(
    r"""(?P<field>["']?(?:admin_|ssl_keyfile_)?(?:api[_-]key|password)["']?\s*[=:]\s*)
        (?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<bare>[^\s,)}"']+))""",
    re.IGNORECASE | re.VERBOSE,
)
_KEY_OPTION = re.compile(r"(--(?:admin-)?api-key[ =])(\S+)")
_BEARER = re.compile(r"(Bearer\s+)([^\s\"',]+)", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_NOT_SECRETS = frozenset({"none", "null", "true", "false", MASK.lower()})


def _mask_field(found: re.Match[str]) -> str:
    quote = found["quote"] or ""
    value = found["quoted"] if quote else found["bare"]
    if not value or value.lower() in _NOT_SECRETS:
        return found[0]
    return f"{found['field']}{quote}{MASK}{quote}"


def redact(text: str, secrets: Iterable[str | None] = ()) -> str:
    """Mask known secrets, and what stands where SGLang or a client prints one."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _KEY_FIELD.sub(_mask_field, text)
    text = _KEY_OPTION.sub(rf"\g<1>{MASK}", text)
    text = _BEARER.sub(rf"\g<1>{MASK}", text)
    return _HUB_TOKEN.sub(MASK, text)


def redact_tree(value: Any, secrets: Iterable[str | None] = ()) -> Any:
    """The same over dicts and lists; a field named like a key loses its value whatever it is."""
    known = tuple(secrets)
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, dict):
        return {
            key: MASK
            if isinstance(item, str) and item and re.search(r"api_?key$|password$", str(key), re.IGNORECASE)
            else redact_tree(item, known)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_tree(item, known) for item in value]
    return value
