// On the page of search results: name the refusals that a pasted message is one of. Sphinx's own
// search wants every word of it on a page, and a message has values that no page has.

const MOST_SHOWN = 3;

function escapedForPattern(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

// Return the refusals that a message is one of, those with the longest fixed text first.
function refusalsOf(message, refusals) {
  const said = message.replace(/\s+/g, " ").trim().replace(/^error: /, "");
  const matching = refusals.filter((one) => {
    const pattern = one.parts.map(escapedForPattern).join(".*?");
    return new RegExp(`^${pattern}(;.*)?$`, "s").test(said);
  });
  const fixed = (one) => one.parts.join("").length;
  return matching.sort((one, two) => fixed(two) - fixed(one)).slice(0, MOST_SHOWN);
}

document.addEventListener("DOMContentLoaded", () => {
  const message = new URLSearchParams(window.location.search).get("q") || "";
  const results = document.getElementById("search-results");
  const matching = refusalsOf(message, REFUSALS);
  if (!results || !matching.length) return;
  const title = document.createElement("h2");
  title.textContent = matching.length > 1 ? "Refusals like this message" : "This refusal";
  results.before(title);
  const list = document.createElement("ul");
  list.id = "refusals";
  for (const one of matching) {
    const link = document.createElement("a");
    link.href = `reference/errors.html#${one.anchor}`;
    link.textContent = one.text;
    list.appendChild(document.createElement("li")).appendChild(link);
  }
  results.before(list);
});
