"""Takes the code blocks of documents apart: what is Python, what a shell runs, and what is marked as not run in CI."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
NOT_RUN, LONG = "not run in CI: ", "run by make test-long: "
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>.*) -->\n)?^(?P<indent> *)```(?P<language>.*)\n(?P<code>(?:.*\n)*?)^(?P=indent)```$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        document: Path of the document, from the checkout's root.
        line: Number of its first line of code, from 1.
        language: What follows the opening fence.
        code: Lines between the fences.
        mark: The comment right above the block, "" where there is none.
    """

    document: str
    line: int
    language: str
    code: str
    mark: str

    @property
    def runs(self) -> bool:
        """Whether continuous integration runs it."""
        return not self.mark

    def commands(self) -> list[str]:
        """Shell commands, one an entry: without comments and assignments, continued lines joined, variables put in."""
        found, variables = list[str](), dict[str, str]()
        for line in self.code.replace("\\\n", " ").splitlines():
            if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
                variables[assigned[1]] = assigned[2]
                continue
            words = shlex.split(re.sub(r"\$(\w+)\b", lambda name: variables.get(name[1], name[0]), line), comments=True)
            if words:
                found.append(shlex.join(words))
        return found

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(name: str | Path) -> list[Block]:
    """The code blocks of a document, in order."""
    text = (ROOT / name).read_text()
    return [
        Block(
            str(name),
            text[: each.start("code")].count("\n") + 1,
            each["language"],
            re.sub(rf"^{each['indent']}", "", each["code"], flags=re.MULTILINE),
            each["mark"] or "",
        )
        for each in _BLOCK.finditer(text)
    ]


def python_of(name: str | Path) -> str:
    """The Python blocks of a document as one script, with the document's line numbers."""
    script = ""
    for block in blocks_of(name):
        if block.language == "python" and block.runs:
            script += "\n" * (block.line - 1 - script.count("\n")) + block.code
    return script
