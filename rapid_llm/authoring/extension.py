"""What a new op of the AOT extension adds to the files that list its ops, each list in the order of names."""

from __future__ import annotations

from typing import Final

from .edits import insert_sorted
from .plan import Plan
from .shared import Parameter, declared, schema

_HEADER: Final = "csrc/include/rapid_llm_ext.h"
_LIBRARY: Final = "csrc/common_extension.cc"
_TEST: Final = "tests/kernels/test_aot_extension.py"


def declare(made: Plan, symbol: str, parameters: tuple[Parameter, ...]) -> None:
    """Declare `symbol` by both doors, as a torch op, as the module's function, and in the schemas' test."""
    header = made.text(_HEADER)
    for pattern, kind in ((r"^void (\w+)\(StableTensor&", "StableTensor"), (r"^void (\w+)\(Tensor&", "Tensor")):
        line = f"void {symbol}({declared(parameters, kind)});\n"
        header = insert_sorted(header, pattern, symbol, line, ");", _HEADER)
    made.edit(_HEADER, header)
    library = made.text(_LIBRARY)
    for pattern, line, end in (
        (r"^    m\.def\(\s*\"(\w+)\(", f'    m.def("{symbol}{schema(parameters)}");\n', ");"),
        (r"^    m\.impl\(\"(\w+)\"", f'    m.impl("{symbol}", TORCH_BOX(&rapid_llm::ext::{symbol}));\n', ");"),
        (r"^      RAPID_LLM_THIN\((\w+)\)", f"      RAPID_LLM_THIN({symbol}),\n", "),"),
    ):
        library = insert_sorted(library, pattern, symbol, line, end, _LIBRARY)
    made.edit(_LIBRARY, library)
    entry = f'    "{symbol}": "{schema(parameters)}",\n'
    made.edit(_TEST, insert_sorted(made.text(_TEST), r"^    \"(\w+)\": (?:\"\(|\()", symbol, entry, "\n", _TEST))
