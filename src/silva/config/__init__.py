"""All options of a run as one checked object.

Consumes the options classes of the other rooms, a command line and TOML files; produces a `RunConfig`, which is their
flat union: a component that takes `AgentOptions` can be given the RunConfig itself.

An option is declared once, beside the code that uses it: a field of a frozen dataclass in the `options.py` of its room,
made by `silva.types.option.opt`. The flag, the type, the bounds, the default and the help come from that field alone.
This room adds what spans options: the union, parsing, the file form, and the checks of combinations. A value or a
combination that would be ignored is refused with a sentence.

Open `options.py` first, then `parse.py`; the checks are in `validate.py` and `validate_training.py`.
"""
