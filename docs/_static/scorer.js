// How search orders its results: headings that have the question first, then pages of the guide,
// the reference, and the decisions last. Of equals, pages of a first week come first. The numbers
// but for `score` are Sphinx's own.
const FIRST_WEEK = {
  your_data: 4, your_model: 4, your_optimizer: 4, several_hosts: 4, mixed_cluster: 3,
  reading_a_plan: 3, refused: 3, evaluation: 3, checkpoints: 2, large_models: 2, planning: 1,
};
var Scorer = {
  score: (result) => {
    const [page, , , , score, , kind] = result;
    if (page.startsWith("adr/")) return score - 100;
    if (page.startsWith("reference/")) return score - 20;
    const first = FIRST_WEEK[page] || 0;
    return first + (kind === SearchResultKind.title ? score + 20 : score);
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
