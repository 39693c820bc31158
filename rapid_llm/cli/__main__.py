"""`python -m rapid_llm.cli`, the same as `rapid-llm`."""

from rapid_llm.cli import main

main()
