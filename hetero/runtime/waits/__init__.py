"""Methods by which the control thread waits for the GPU (paper section 4.2, fast synchronisation).

`fast`   sleep for what is left of the predicted wait, less what a sleep may be late, then poll: a
         flag in shared memory where that is sound and faster, else the event's status
`event`  the driver's wait for one launch
`finish` the driver's wait for the whole queue, before anything else is submitted
`copy`   `finish`, and what is handed over is copied (`hetero.runtime.handover`)
"""

from hetero.runtime.waits.policy import WaitPolicy
from hetero.runtime.waits.prediction import SleepTimes
from hetero.runtime.waits.shared import SyncMethod, WaitTotals
from hetero.runtime.waits.synchroniser import Synchroniser
from hetero.runtime.waits.wait_point import WaitKey, WaitPoint

__all__ = [
    "SleepTimes",
    "SyncMethod",
    "Synchroniser",
    "WaitKey",
    "WaitPoint",
    "WaitPolicy",
    "WaitTotals",
]
