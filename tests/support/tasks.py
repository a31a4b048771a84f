"""Messages and questions of a task's rows."""

from datasets import Dataset


def messages(role_and_content: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in role_and_content]


def questions(rows: Dataset) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]
