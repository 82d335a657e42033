"""All options of a run as one checked object.

Consumes the options classes of the other rooms, a command line and TOML files; produces a `RunConfig`, which is their
flat union: a component that takes `AgentOptions` can be given the RunConfig itself.

An option is declared once, beside the code that uses it: a field of a frozen dataclass in the `options.py` of its room,
made by `silva.types.option.opt`. The flag, the type, the bounds, the default and the help come from that field alone.
This room adds what spans options: the union, parsing, the file form, and the checks of combinations. A value or a
combination that would be ignored is refused with a sentence.

Open `options.py` first, then `parse.py`; the checks are in `checks.py` and `training_checks.py`.
"""

from silva.config.addresses import is_address
from silva.config.checks import (
    Command,
    EvalSet,
    check_token_budget,
    eval_sets,
    min_group_size,
    one_context_reason,
    several_contexts_problem,
    validate,
    validate_judgement,
)
from silva.config.options import RunConfig
from silva.config.parse import add_options, from_values, read_config_file, refuse_unknown, resolve, write_config_file
from silva.config.training_checks import (
    algorithm_of,
    check_training_run,
    is_group_of_one,
    needs_reference,
    training_warnings,
    trains_on_records,
)

__all__ = [
    "Command", "EvalSet", "RunConfig", "add_options", "algorithm_of", "check_token_budget", "check_training_run",
    "eval_sets", "from_values", "is_address", "is_group_of_one", "min_group_size", "needs_reference",
    "one_context_reason", "read_config_file", "refuse_unknown", "resolve", "several_contexts_problem",
    "training_warnings", "trains_on_records", "validate", "validate_judgement", "write_config_file",
]  # fmt: skip
