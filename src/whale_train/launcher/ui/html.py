"""Convert a view for the terminal to HTML that is legible in light and dark notebooks."""

from io import StringIO

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

_COLUMNS = 110
# Plain text takes the colour of the surrounding page. The listed colours have a contrast of about
# 4 to 1 on both white and black. Dim text is halfway between the first two colours.
_THEME = TerminalTheme(
    (255, 255, 255),
    (0, 0, 0),
    [
        *((110, 110, 110), (201, 42, 42), (32, 132, 60), (158, 110, 0)),
        *((51, 112, 214), (166, 70, 186), (8, 126, 139), (118, 118, 118)),
    ],
)
_PAGE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;color:inherit;'
    "background:none;font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">"
    "{code}</pre>"
)


def as_html(view: RenderableType) -> str:
    """Return a view as a self-contained HTML element."""
    console = Console(
        file=StringIO(),
        record=True,
        width=_COLUMNS,
        force_terminal=True,
        color_system="standard",
        highlight=False,
    )
    console.print(view)
    return console.export_html(theme=_THEME, code_format=_PAGE, inline_styles=True)
