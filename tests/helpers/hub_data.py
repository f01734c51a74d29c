"""Write small data sets with the columns of public ones, in directories that `datasets` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TURN = [{"role": "user", "content": "What is 2 + 3?"}]
RIGHT = [*TURN, {"role": "assistant", "content": "2 + 3 = 5."}]
WRONG = [*TURN, {"role": "assistant", "content": "2 + 3 = 6."}]
PAIR = {"prompt": "What is 2 + 3?", "prompt_id": "a", "chosen": RIGHT, "rejected": WRONG}
PAIR |= {"messages": RIGHT, "score_chosen": 9.0, "score_rejected": 2.0}
PROBLEM = {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
SOLVED = {"source": "synthetic_math", "problem": "What is 2 + 3?", "messages": RIGHT}
SOLVED |= {"solution": "2 + 3 = 5, so the answer is $\\boxed{5}$."}
CHAT = {"prompt": "What is 2 + 3?", "prompt_id": "a", "messages": RIGHT}
# option of conf/data -> configuration, splits and a row, as on the Hub
PUBLIC: dict[str, tuple[str, tuple[str, str], dict[str, Any]]] = {
    "gsm8k": ("main", ("train", "test"), PROBLEM),
    "numina_math": ("default", ("train", "test"), SOLVED),
    "ultrachat": ("default", ("train_sft", "test_sft"), CHAT),
    "ultrafeedback": ("default", ("train_prefs", "test_prefs"), PAIR),
}


def write_public(folder: Path, name: str, *more: dict[str, Any], rows: int = 8) -> str:
    """Write the data set of data=`name` to a folder, with rows `more` at the end of each split.

    Return the folder, for data.hub_id.
    """
    subset, splits, row = PUBLIC[name]
    files = [f"  - split: {split}\n    path: {split}.jsonl" for split in splits]
    card = ["---", "configs:", f"- config_name: {subset}", "  data_files:", *files, "---", ""]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(card))
    text = "".join(f"{json.dumps(each)}\n" for each in (*[row] * rows, *more))
    for split in splits:
        (folder / f"{split}.jsonl").write_text(text)
    return str(folder)
