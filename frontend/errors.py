"""How a refused or failed request becomes an HTTP status: the codes are those of `bus.messages.Error`."""

from http import HTTPStatus

from vllm.exceptions import GenerationError, GracefulHTTPError

_STATUS = {
    "invalid": HTTPStatus.BAD_REQUEST,
    "unsupported": HTTPStatus.BAD_REQUEST,  # not 501: clients send what fails with 5xx again
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
}


class RequestError(GracefulHTTPError, GenerationError):
    """A request that cannot be served, or failed; vLLM's server answers with `message` and the status of `code`.

    It is a `GracefulHTTPError` to the parts of vLLM that answer at once, and a `GenerationError` to those that stream.
    """

    def __init__(self, code: str, message: str) -> None:
        status = _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
        GracefulHTTPError.__init__(self, message, status)
        self.status_code = status
        self.code = code


def unsupported(feature: str) -> RequestError:
    """The refusal of a feature that vLLM's API has and this engine does not."""
    return RequestError("unsupported", f"{feature} is not supported by this engine; leave it out")
