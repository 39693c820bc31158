"""The locator: why two configurations of one model differ, from the whole model down to the row.

`locate` compares; `replay` runs one wrong call again from its case file.
"""

from .case import Replay, replay
from .configuration import Configuration
from .diagnosis import Diagnosis
from .locate import locate

__all__ = ["Configuration", "Diagnosis", "Replay", "locate", "replay"]
