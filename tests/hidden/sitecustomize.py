"""Hides the packages named in RAPID_LLM_TEST_WITHOUT from this Python and its children.

With this folder on PYTHONPATH, Python runs this file at start; an installed package then looks as if it were absent, to
`import` and to `importlib.util.find_spec` alike.
"""

import importlib.machinery
import os

_hidden = frozenset(name for name in os.environ.get("RAPID_LLM_TEST_WITHOUT", "").split(",") if name)
_find = importlib.machinery.PathFinder.find_spec


def _find_spec(_class, name, path=None, target=None):
    return None if name.partition(".")[0] in _hidden else _find(name, path, target)


if _hidden:
    importlib.machinery.PathFinder.find_spec = classmethod(_find_spec)
