"""Defects that `scripts/plant_defects.py` plants are changes of lines that are there."""

import pytest
from scripts.plant_defects import DEFECTS, ROOT


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_changes_one_place(name: str) -> None:
    defect = DEFECTS[name]
    text = (ROOT / defect.path).read_text(encoding="utf-8")
    assert text.count(defect.before) == 1
    assert defect.after != defect.before
