"""A page as html.parser sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "wbr", "img", "link", "hr", "input"}
LOADING = {"src", "srcset", "data", "poster", "action", "formaction", "background", "ping"}


class Page(HTMLParser):
    """Collects tags, texts and whatever refers to something; raises where elements do not close as they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, attrs)

    def _take(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag} has an attribute twice: {names}"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1] == tag, f"</{tag}> closes <{self._open[-1]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.texts.append(data)
        if self.headings and {"h1", "h2", "h3", "h4"} & set(self._open):
            self.headings[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        """All that is to be read, on one line."""
        return " ".join("".join(self.texts).split())
