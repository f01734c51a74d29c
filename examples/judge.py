r"""A reward from a judge model behind an OpenAI-compatible API, such as `method=serve`.

    export JUDGE_URL=http://judge:8000/v1 JUDGE_MODEL=judge JUDGE_API_KEY=...
    python launch/run.py hardware=mi300x model=qwen3_4b method=grpo \
        data=jsonl data.path=examples/questions.jsonl \
        data.columns.prompt=question data.system_prompt='Reason step by step.' \
        'method.rewards={examples.judge.quality: 1.0}' method.reward_confined=false \
        'runtime.pass_env=[JUDGE_URL,JUDGE_MODEL,JUDGE_API_KEY]' data.preview=2

The preview asks the judge about the answers of two rows. Without it, the command trains.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S, AT_ONCE = 30, 16
ASK = "Grade the answer from 0 to 10. Reply with the number only.\n\nQuestion: {}\n\nAnswer: {}"


def grade(prompt: Any, completion: Any) -> float | Exception:
    """Return the judge's grade, scaled to 0 to 1, or the error."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in (prompt, completion)]
    try:
        message = {"role": "user", "content": ASK.format(*texts)}
        body = {"model": os.environ["JUDGE_MODEL"], "temperature": 0, "messages": [message]}
        request = urllib.request.Request(
            f"{os.environ['JUDGE_URL']}/chat/completions",
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', '')}",
            },
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
            return min(1.0, float(re.findall(r"\d+(?:\.\d+)?", answer)[0]) / 10)
    except Exception as error:  # a timeout, an HTTP status, or a reply without a number
        return error


def quality(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """Grade completions; None, which excludes one from its group, if the judge fails for it."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        grades = list(pool.map(grade, prompts, completions))
    errors = [each for each in grades if isinstance(each, Exception)]
    if len(errors) == len(grades):
        raise errors[0]
    return [None if isinstance(each, Exception) else each for each in grades]
