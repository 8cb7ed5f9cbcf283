"""Rejected calls, and their error format in each protocol. Pure."""

from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import JaxrlError

OPENAI_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
"""The `type` of an error in OpenAI's shape, by status."""
ANTHROPIC_KINDS = {**OPENAI_KINDS, 413: "request_too_large", 503: "overloaded_error"}
"""The same in Anthropic's shape."""
UNSUPPORTED = "unsupported_parameter"
"""Error code of a field that is refused."""


@dataclass(eq=False)
class CallRefused(JaxrlError):
    """A rejected call. The client gets the message, the field and the status."""

    message: str
    status: int = 400
    field: str | None = None  # of the body, such as messages[2].content
    code: str | None = None  # machine-readable
    retry_after_s: float | None = None  # earliest time to retry, seconds

    def __str__(self) -> str:
        return self.message if self.field is None else f"{self.field}: {self.message}"


def openai_error(refused: CallRefused) -> dict[str, Any]:
    """Return the error as the body of an OpenAI error."""
    return {
        "error": {
            "message": str(refused),
            "type": OPENAI_KINDS.get(refused.status, "server_error"),
            "param": refused.field,
            "code": refused.code,
        }
    }


def anthropic_error(refused: CallRefused) -> dict[str, Any]:
    """Return the error as the body of an Anthropic error."""
    kind = ANTHROPIC_KINDS.get(refused.status, "api_error")
    error: dict[str, Any] = {"type": kind, "message": str(refused)}
    if refused.code == UNSUPPORTED and refused.field is not None:
        code = f"{refused.field}_unsupported_request"  # the SDK then sends whole conversations
        error["details"] = {"error_code": code, "unsupported": [refused.field]}
    return {"type": "error", "error": error}
