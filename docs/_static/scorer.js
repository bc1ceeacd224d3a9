// How search orders its results: guide pages first, reference next, decisions last. The numbers
// but for `score` are Sphinx's own.
var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    if (page.startsWith("adr/")) return score - 100;
    return page.startsWith("reference/") ? score - 20 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
