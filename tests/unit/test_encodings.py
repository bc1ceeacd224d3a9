"""Files are in UTF-8 whatever the locale is: every place that opens one says so."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = ("read_text", "write_text")
FILES = ("open", "fdopen")


def test_every_text_file_has_its_encoding() -> None:
    sources = sorted((ROOT / "src" / "whale_train").rglob("*.py"))
    assert len(sources) > 200
    said = [place for path in sources for place in _unsaid(path)]
    assert said == []


def _unsaid(path: Path) -> list[str]:
    """Return the calls of a file that open one by the locale's encoding."""
    places = []
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        keywords = {each.arg for each in call.keywords}
        of_object = isinstance(call.func, ast.Attribute)
        name = getattr(call.func, "attr" if of_object else "id", "")
        owner = getattr(getattr(call.func, "value", None), "id", "") if of_object else ""
        opens = name in FILES and not (
            name == "open" and owner in ("os", "archive", "image", "tarfile", "tracker")
        )
        words = [x.value for x in call.args if isinstance(x, ast.Constant)]
        is_binary = any(isinstance(x, str) and "b" in x and set(x) <= set("rwxab+") for x in words)
        is_text = bool({"text", "universal_newlines"} & keywords) and name != "alert"
        if "encoding" not in keywords and (
            (of_object and name in PATHS) or (opens and not is_binary) or is_text
        ):
            places.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    return places
