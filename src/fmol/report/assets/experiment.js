// An experiment: what it came to, beside what was claimed.

function claimList(claims) {
  const item = (claim) =>
    el(
      "li",
      { class: claim.holds ? "claim holds" : "claim fails" },
      el("b", {}, `${claim.verdict}: `),
      prose(claim.text),
      claim.whose === "paper" ? " (the paper’s)" : "",
      el("p", { class: "say" }, prose(claim.evidence)),
    );
  return el("ul", { class: "claims" }, claims.map(item));
}
function experimentTable({ title, columns, rows }) {
  const has = (sign) => rows.some(([, cells]) => cells.some((text) => text.includes(sign)));
  const words = [
    has("±") ? "Means over seeds; ± is half of their 95 % interval." : "",
    has("[") ? "The paper’s numbers in brackets." : "",
  ].filter(Boolean);
  return [
    el("h3", {}, title),
    words.length ? el("p", { class: "say" }, words.join(" ")) : null,
    table(
      ["", ...columns],
      rows.map(([name, cells]) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, name),
          cells.map((text) => el("td", {}, text)),
        ),
      ),
      title,
    ),
  ];
}
function experiment() {
  const { reading, claims, tables, figures, note } = data.experiment;
  section(
    "experiment",
    "The experiment",
    reading,
    claims.length ? claimList(claims) : null,
    tables.map(experimentTable),
    figures.map(({ name, image }) => el("figure", { class: "card wide" }, el("img", { src: image, alt: name }))),
    note ? el("p", { class: "say" }, prose(note)) : null,
  );
}
