"""Errors that users can fix, and errors of devices: the code's name, the operation, the remedy."""

from __future__ import annotations

from typing import Any

from hetero.backends.sentences import one_sentence


class UserError(ValueError):
    """Something that the user can mend; the message is one sentence for people.

    What a file or a library says at length is put on one line and cut in the middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_sentence(message))


class DeviceError(RuntimeError):
    """A device could not do an operation.

    `device` is the backend's name, `operation` what was tried, `code` the native status code by
    name (for example `CL_OUT_OF_RESOURCES`) and `remedy` what the user can do about it.
    """

    def __init__(self, device: str, operation: str, code: str, remedy: str = "") -> None:
        self.device = device
        self.operation = operation
        self.code = code
        self.remedy = remedy
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"{device}: {operation} failed: {code}{tail}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return pickled with its fields, so that a pool of processes hands it on."""
        return type(self), (self.device, self.operation, self.code, self.remedy)


class DeviceUnavailableError(DeviceError):
    """The device cannot be opened on this machine (no driver, no library, no hardware)."""


class KernelBuildError(DeviceError):
    """A driver's compiler refused a program, crashed or hung.

    The device is of no use to the model that needs it, another one may be.
    """


class DeviceOptionError(DeviceError, UserError):
    """Something that the user named does not exist or cannot be used here.

    No other device stands in for it.
    """


class DeviceLostError(DeviceError):
    """The device failed earlier, or was closed, and takes no further calls."""


class WaitTimeoutError(DeviceError):
    """A wait passed its deadline; names the kernel that did not complete, and the device's kind."""

    def __init__(self, device: str, kernel: str, deadline_s: float, kind: str = "") -> None:
        super().__init__(
            device,
            f"waiting for {kernel}",
            f"not complete after {deadline_s:.3g} s",
            "the driver may have hung: close the model and open it again; if the machine is only "
            "slow, set HETERO_TIMEOUT_SCALE=4",
        )
        self.kernel = kernel
        self.kind = kind
        self.deadline_s = deadline_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Do the same as `DeviceError.__reduce__`."""
        return type(self), (self.device, self.kernel, self.deadline_s, self.kind)
