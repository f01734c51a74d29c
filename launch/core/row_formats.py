"""Define the row formats of methods (`rows` in conf/method), for the plan and for the ranks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launch.core.errors import UserError, near_or_all
from launch.core.near_names import columns_hint, field_hint, partly_mapped

TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")  # chat template inputs besides messages
# TRL passes these to rewards itself, or takes them for images of the prompt.
TRL_ARGUMENTS = tuple("prompts completions trainer_state log_extra log_metric image images".split())


@dataclass(frozen=True)
class RowFormat:
    """A row needs all fields of one of `forms`, which are TRL's dataset formats."""

    forms: tuple[tuple[str, ...], ...]
    read: tuple[str, ...]  # all fields that the method reads, in the order of its columns
    rewards: tuple[str, ...] = ()  # fields that only rewards read; a row may lack them
    learned: tuple[str, ...] = ()  # fields that end with an answer, which the method learns
    reserved: tuple[str, ...] = ()  # fields that a row must not have
    remedy: str | None = None  # for rows of another format


SFT = (("messages",), ("text",), ("prompt", "completion"))
FORMATS = {
    "sft": RowFormat(
        SFT,
        ("prompt", "completion", "messages", "text", *TEMPLATE_FIELDS),
        learned=("messages", "completion"),
    ),
    "dpo": RowFormat(
        (("chosen", "rejected"),),
        ("prompt", "chosen", "rejected", *TEMPLATE_FIELDS),
        learned=("chosen", "rejected"),
    ),
    "grpo": RowFormat(
        (("prompt",),),
        ("prompt",),
        rewards=("answer",),
        reserved=TRL_ARGUMENTS,
        remedy="data.columns.prompt=<field>; or for chats, all messages before the answer as "
        "prompt (docs/data.md#rows-of-another-format)",
    ),
    "evaluate": RowFormat(
        (("prompt",),),
        ("prompt",),
        rewards=("answer",),
        remedy="data.columns.prompt=<field>; or for chats, the held-out loss while training: "
        "method=sft method.selection.metric=eval_loss method.args.save_steps=25",
    ),
    "samples": RowFormat(
        (("prompt", "completion", "score"),),
        ("prompt", "completion", "score"),
        learned=("completion",),
    ),
}


def row_format(name: str) -> RowFormat:
    """Return a format by its name. Raises UserError for an unknown name."""
    if name not in FORMATS:
        raise UserError(f"method.rows={name}: no such row format.{near_or_all(name, FORMATS)}")
    return FORMATS[name]


def fields_problem(
    row: Mapping[str, Any],
    name: str,
    reader: str | None = None,
    rewards: Collection[str] | None = None,
) -> str | None:
    """Return why the fields of a row do not have the format `name`, and the remedy, or None.

    `reader` is what needs the fields, by default the method with the name of the format. `rewards`
    are the fields that rewards read, if they are known.
    """
    form, reader = row_format(name), reader or f"method={name}"
    if reserved := [field for field in form.reserved if field in row]:
        return (
            f"has the field {reserved[0]}, a name that TRL uses for an argument of its own. Rename "
            "or remove the field."
        )
    if any(row.keys() >= {*needed} for needed in form.forms):
        return _system_problem(row, form, reader)
    needs = " or ".join("+".join(needed) for needed in form.forms)
    # A row may lack the fields of rewards. No reward could read a field that is renamed.
    of_rewards = [field for field in form.rewards if rewards is None or field in rewards]
    wanted = [*((*needed, *of_rewards) for needed in form.forms), *form.forms]
    kept = {*(rewards or ())}.difference(form.read, form.rewards)
    columns = (columns_hint(given, w) for given in (row.keys() - kept, row) for w in wanted)
    remedy = field_hint(row) or next(filter(None, columns), form.remedy)
    used = dict(override.partition("=")[::2] for override in (remedy or "").split())
    lost = [name for part in partly_mapped(used) for name in part["lost"] if name in row]
    return (
        f"has {', '.join(row) or 'no field'}, but {reader} needs {needs}."
        f"{f' Use: {remedy}.' if remedy else ''}"
        f"{f' The field {lost[0]} would be left out.' if lost else ''}"
    )


def _system_problem(row: Mapping[str, Any], form: RowFormat, reader: str) -> str | None:
    """Return why the row's system prompt in a field of its own would be dropped, or None."""
    is_read = "system" in (*form.read, *form.rewards)
    if is_read or not str(row.get("system") or "").strip():
        return None
    return (
        f"has the field system, which {reader} does not read. Make it the first message, with "
        "role system, of messages or prompt. To drop it, use: data.columns.system=null."
    )
