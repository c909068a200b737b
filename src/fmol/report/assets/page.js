// How it was done, and the page as a whole.

// ---- how it was done -------------------------------------------------------------------------

function copyButton(text) {
  const button = el(
    "button",
    {
      type: "button",
      class: "small",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text);
        } catch {
          const area = el("textarea", {}, text);
          document.body.append(area);
          area.select();
          document.execCommand("copy");
          area.remove();
        }
        button.textContent = "copied";
        setTimeout(() => {
          button.textContent = "copy";
        }, 1500);
      },
    },
    "copy",
  );
  return button;
}
/** A configuration as its file has it, one block per table. */
function tomlOf(pairs, copied = "") {
  const tables = new Map();
  for (const [key, value] of pairs) {
    const [, head, rest] = key.match(/^([^.]+)\.(.+)$/s) || [null, "", key];
    tables.set(head, [...(tables.get(head) || []), `${rest} = ${value}`]);
  }
  const text = [...tables]
    .map(([head, lines]) => `${head ? `[${head}]\n` : ""}${lines.join("\n")}\n`)
    .join("\n");
  return [
    el(
      "div",
      { class: "tomls" },
      [...tables].map(([head, lines]) =>
        el(
          "div",
          { class: "code" },
          el("pre", {}, el("code", {}, head ? [el("b", {}, `[${head}]`), "\n"] : null, lines.join("\n"))),
        ),
      ),
    ),
    copied ? el("p", { class: "say" }, copyButton(text), copied) : null,
  ];
}
function methods() {
  const firsts = groups.map((_, g) => firstRun(g));
  const tableOfPairs = (which, label) => {
    const keys = [...new Set(firsts.flatMap((r) => r[which].map(([k]) => k)))].filter(
      (k) => !(which === "config" && k === "seed" && seeds > 1),
    );
    if (!keys.length)
      return el(
        "p",
        { class: "nothing" },
        label === "Configuration" ? "No configuration was recorded with this run." : "Nothing was recorded.",
      );
    const value = (r, k) => (r[which].find(([key]) => key === k) || [null, "–"])[1];
    const same = (k) => firsts.every((r) => value(r, k) === value(firsts[0], k));
    const differing = keys.filter((k) => !same(k)),
      equal = keys.filter(same);
    const row = (k) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, el("code", {}, k)),
        firsts.map((r) => el("td", {}, el("code", {}, value(r, k)))),
      );
    const common = equal.length
      ? table(
          ["", "value"],
          equal.map((k) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, el("code", {}, k)),
              el("td", {}, el("code", {}, value(firsts[0], k))),
            ),
          ),
          label,
        )
      : null;
    return [
      differing.length
        ? table(["", ...groups.map((g) => g.label)], differing.map(row), `${label}: what differs`)
        : el("p", { class: "nothing" }, "The same in all runs."),
      common
        ? el(
            "details",
            {},
            el(
              "summary",
              {},
              `${whole(equal.length)} ${equal.length === 1 ? "entry" : "entries"} the same in all`,
            ),
            common,
          )
        : null,
    ];
  };
  const commands = runs
    .filter((r) => r.command)
    .map((r) =>
      el(
        "div",
        { class: "command" },
        runs.length > 1 ? el("p", { class: "say" }, `${r.name}, seed ${r.seed}`) : null,
        el("div", { class: "code" }, el("pre", {}, el("code", {}, r.command)), copyButton(r.command)),
      ),
    );
  const folded =
    commands.length > 3
      ? [
          commands.slice(0, 2),
          el("details", {}, el("summary", {}, `${commands.length - 2} more`), commands.slice(2)),
        ]
      : commands;
  section(
    "methods",
    "How it was done",
    comparing ? "What differs between the runs stands first." : "",
    el("h3", {}, "Configuration"),
    single && runs[0].config.length ? tomlOf(runs[0].config, runs[0].problem ? " all of it, for a config file" : " all of it") : tableOfPairs("config", "Configuration"),
    el("h3", {}, "Environment"),
    single && runs[0].environment.length
      ? tomlOf(runs[0].environment)
      : tableOfPairs("environment", "Environment"),
    el("h3", {}, "Do it again"),
    commands.length ? folded : el("p", { class: "nothing" }, "No command was recorded with this run."),
  );
}

// ---- all of it -------------------------------------------------------------------------------

/** One section; where it fails it says so, and the others still stand. */
function part(id, title, build) {
  try {
    build();
  } catch (error) {
    section(id, title, "", el("p", { class: "nothing" }, failed("part", error)));
  }
}
buildTop();
if (data.experiment) part("experiment", "The experiment", experiment);
if (runs.length) {
  part("overview", "At a glance", headline);
  if (data.front) part("front", "What can be traded", tradeOffs);
  part("losses", "Losses", losses);
  part("direction", "Weights and direction", direction);
  part("shape", "Objectives against one another", () =>
    section("shape", "Objectives against one another", "", grid(radarCard(), tradeCard())),
  );
  part("holdings-section", "Who has what", holdings);
  part("clients-section", "What each client gets", () =>
    section("clients-section", "What each client gets", "", clientsCards()),
  );
  part("conflict", "Conflict between objectives", conflicts);
  part("communication", "Communication and time", communication);
  part("methods", "How it was done", methods);
}
document
  .getElementById("body")
  .after(
    el(
      "footer",
      {},
      "One file, nothing else needed: it can be sent as it is. Arrow keys move through a chart that has the focus.",
    ),
  );
applyTheme();

prefersDark.addEventListener("change", () => {
  if (!shown.theme) applyTheme();
});
let pending = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => {
    for (const card of cards) if (Math.floor(card.stage.clientWidth) !== card.width) card.render();
    hintAtMore();
  });
}).observe(main);
window.addEventListener("scroll", hideTip, { passive: true });
