"""The one error that a request can end with: a status, a text for people, and what a program wants to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rapid_llm.engine.checks import ParameterError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Status -> `error.type`; the words are OpenAI's where it has one."""


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ApiError(Exception):
    """status: of HTTP. param: the field at fault, None where it is none. code: a word for programs.

    headers: beside the usual ones, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def json(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, the shape that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: Exception, param: str | None = None) -> ApiError:
    """What the engine says of a value that it does not take: 422 for one of the wrong type, 400 for any other.

    param: the field at fault where the error does not name one itself.
    """
    if isinstance(error, ParameterError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    status, code = (422, "invalid_type") if isinstance(error, TypeError) else (400, "invalid_value")
    return ApiError(status, str(error), param=param, code=code)


def dump(value: Any) -> bytes:
    """`value` as JSON in UTF-8. Raises `ValueError` for NaN and infinities, which JSON has no word for."""
    return _ENCODER.encode(value).encode()
