"""What every config section and every message to the user is made of.

A section is a frozen pydantic model that lives beside the code it configures; `config.py` only lists them. Types are checked without
conversion between kinds (the string "false" is no bool, 1.5 is no int), because a converted typo is a silent change of the maths.
"""

import pydantic


class UserError(ValueError):
    """Something a user can mend: says where (config path or file), what was got and what to do. Commands print it alone, exit code 2."""


class Section(pydantic.BaseModel):
    """Base of all config sections: frozen, unknown keys forbidden, a field's docstring is its documentation."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def __hash__(self):  # fields may hold dicts and lists; sections are compared and hashed by value
        return hash(self.model_dump_json())
