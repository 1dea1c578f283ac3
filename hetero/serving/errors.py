"""Errors in the form that clients of OpenAI's and Anthropic's APIs expect."""

from __future__ import annotations

from typing import Any, Final

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    507: "insufficient_storage",
}
_OPENAI: Final = {404: "invalid_request_error", 503: "server_error", 413: "invalid_request_error"}
_ANTHROPIC: Final = {500: "api_error"}


class ApiError(Exception):
    """A status, and one sentence: the thing, the rule, the remedy.

    `param` is the field at fault, `code` a word for programs (Anthropic's API has it in `details`),
    `retry_s` the time until a retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self, path: str) -> dict[str, Any]:
        """Return the error in the form of the API that the path belongs to."""
        if path.startswith("/v1/messages"):
            error: dict[str, Any] = {"type": self._kind(_ANTHROPIC), "message": self.message}
            if self.code is not None:
                error["details"] = {"error_code": self.code}
            return {"type": "error", "error": error}
        return {
            "error": {
                "message": self.message,
                "type": self._kind(_OPENAI),
                "param": self.param,
                "code": self.code,
            }
        }

    def _kind(self, special: dict[int, str]) -> str:
        return special.get(self.status) or _TYPES.get(self.status, "invalid_request_error")


def missing(what: str, param: str | None = None) -> ApiError:
    """Return the error of an unknown id or another key's: the same for both, without the id."""
    return ApiError(404, f"there is no such {what}: list those there are", param=param)


def too_long(most: int, size: str, param: str) -> ApiError:
    """Return the error of a prompt that does not fit into a context of `most` tokens.

    Clients look for the words of Anthropic's API and for OpenAI's, to shorten a conversation.
    """
    return ApiError(
        400,
        f"the prompt is too long: this model's maximum context length is {most} tokens, {size}: "
        "shorten it",
        param=param,
        code="context_length_exceeded",
    )
