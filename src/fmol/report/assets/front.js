// What can be traded for what: trained models that differ in the preference they were trained with.

/** A measure of a group's trained models, a number per objective: the last known, means over seeds. */
function endsOf(g, measure) {
  return objectives.map((_, s) => {
    const found = groups[g].runs.map((r) => {
      const rows = tableOf(runs[r], measure);
      return rows ? last(rows[s]) : null;
    });
    return found.every(known) ? mean(found) : null;
  });
}
/** Which rows no other one dominates; copies do not dominate one another. */
function undominated(rows, higher) {
  const sign = higher ? -1 : 1;
  const beats = (a, b) =>
    a.every((v, i) => sign * v <= sign * b[i]) && a.some((v, i) => sign * v < sign * b[i]);
  return rows.map((row) => !rows.some((other) => beats(other, row)));
}
const FRONT_SHAPES = [
  (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  (x, y, r) => `M${x},${y - 1.3 * r}L${x + 1.2 * r},${y + r}H${x - 1.2 * r}Z`,
  (x, y, r) => `M${x},${y - 1.4 * r}L${x + 1.4 * r},${y}L${x},${y + 1.4 * r}L${x - 1.4 * r},${y}Z`,
];
const frontMethods = () => [...new Set(data.front.points.map((p) => p.method))];
const ofMethod = (method, look) => EIGHT[look.name][frontMethods().indexOf(method) % 8];

/** The front's points that are chosen and measured: values of the chosen objectives, and if dominated. */
function frontPoints(measure) {
  const chosen = visibleObjectives(),
    drawn = new Set(visibleGroups());
  const points = data.front.points
    .filter((p) => drawn.has(p.group))
    .map((p) => ({ ...p, all: endsOf(p.group, measure), name: groups[p.group].label }))
    .filter((p) => chosen.every((s) => known(p.all[s])));
  const kept = undominated(
    points.map((p) => chosen.map((s) => p.all[s])),
    betterOf(measure) === "higher",
  );
  return points.map((p, i) => ({ ...p, kept: kept[i] }));
}

/** Points in a plane. */
function drawScatter(what, width, look, exporting) {
  const side = exporting ? 12 : 0;
  const head = heading(
    what,
    what.methods.map((m) => ({ name: m, color: ofMethod(m, look), area: true })),
    width,
    look,
    exporting,
  );
  const bottom = head.top + 8 + Math.max(260, Math.min(420, width * 0.5));
  const svg = sheet(what, width, bottom + 48, look, exporting);
  svg.append(head.group);
  const corner = what.corner ? [what.corner] : [];
  const ys = scale({
    values: [...what.points.map((p) => p.y), ...corner.map((c) => c[1])],
    ...what.y,
    from: bottom,
    to: head.top + 8,
    room: 36,
  });
  const ticks = Math.max(...ys.ticks.map((t) => textWidth(ys.text(t))), 10);
  const box = {
    page: width,
    outer: side,
    left: side + ticks + 30,
    right: width - side - 16,
    top: head.top + 8,
    bottom,
  };
  const xs = scale({
    values: [...what.points.map((p) => p.x), ...corner.map((c) => c[0])],
    ...what.x,
    from: box.left,
    to: box.right,
    room: 64,
  });
  svg.append(axes(box, xs, ys, look, { xLabel: what.x.label, yLabel: what.y.label }));
  const places = what.points
    .filter((p) => xs.fits(p.x) && ys.fits(p.y))
    .map((p) => ({ p, x: xs.at(p.x), y: ys.at(p.y) }));
  if (what.joined)
    for (const method of what.methods) {
      const line = places
        .filter(({ p }) => p.method === method && p.kept)
        .sort((a, b) => a.x - b.x)
        .map(({ x, y }) => [x, y]);
      if (line.length > 1)
        svg.append(
          sv("path", {
            d: path(line),
            fill: "none",
            stroke: ofMethod(method, look),
            "stroke-width": 1.3,
            "stroke-opacity": 0.55,
          }),
        );
    }
  for (const { p, x, y } of places) {
    const color = ofMethod(p.method, look),
      shape = FRONT_SHAPES[what.methods.indexOf(p.method) % FRONT_SHAPES.length];
    svg.append(
      sv(
        "g",
        { class: p.kept ? "mark" : "mark dominated", ...groupKeys(p.group) },
        sv("path", {
          d: shape(x, y, 5),
          fill: p.kept ? color : look.paper,
          stroke: color,
          "stroke-width": 1.6,
        }),
      ),
    );
  }
  for (const [a, b] of corner)
    if (xs.fits(a) && ys.fits(b)) {
      const [x, y] = [xs.at(a), ys.at(b)];
      svg.append(
        sv("path", {
          class: "reference",
          d: `M${x - 5},${y - 5}l10,10M${x - 5},${y + 5}l10,-10`,
          stroke: look.ink,
          "stroke-width": 1.8,
        }),
        write(x - 9, y + 4, "reference", look, { "text-anchor": "end" }),
      );
    }
  const ring = sv("circle", {
    r: 9,
    fill: "none",
    stroke: look.ink,
    "stroke-width": 1.5,
    visibility: "hidden",
    "pointer-events": "none",
  });
  svg.append(ring);
  const clear = () => ring.setAttribute("visibility", "hidden");
  const show = ({ p, x, y }) => {
    ring.setAttribute("cx", x);
    ring.setAttribute("cy", y);
    ring.setAttribute("visibility", "visible");
    const color = ofMethod(p.method, look);
    return {
      x,
      y,
      title: `${p.name}${p.kept ? "" : ", dominated"}`,
      rows: [
        { name: what.x.word, text: fmt(p.x), color },
        { name: what.y.word, text: fmt(p.y), color },
      ],
    };
  };
  return byPlace(svg, places, show, clear);
}

function frontCard() {
  const id = "front-points";
  const start = measures.includes(data.front.measure) ? data.front.measure : "loss";
  const state = { x: 0, y: 1, measure: start, axis: "linear", view: objectives.length > 3 ? "all" : "two" };
  const options = objectives.map((name, s) => [s, name]);
  const set = (key, read = (v) => v) => (v) => {
    state[key] = read(v);
    redraw(id)();
  };
  const controls = [];
  if (objectives.length > 2)
    controls.push(
      choice(
        "Kind of chart",
        [
          ["two", "two objectives"],
          ["all", "all objectives"],
        ],
        state.view,
        set("view"),
      ),
      pick("Across", options, state.x, set("x", Number)),
      pick("Up", options, state.y, set("y", Number)),
    );
  if (measures.length > 1)
    controls.push(
      pick(
        "Measure",
        measures.map((m) => [m, measureName(m)]),
        state.measure,
        set("measure"),
      ),
    );
  controls.push(
    choice(
      "Axes",
      [
        ["linear", "linear"],
        ["log", "log"],
      ],
      state.axis,
      set("axis"),
    ),
  );
  const title = "Trained models, by preference";
  return makeCard({
    id,
    title,
    wide: true,
    controls,
    say: () => {
      const way =
        betterOf(state.measure) === "higher"
          ? "Towards the upper right both are better."
          : "Towards the lower left both are better.";
      const averaged = seeds > 1 ? " Means over seeds." : "";
      return state.view === "two"
        ? `A point is a trained model. Hollow ones are dominated: another is at least as good for every chosen objective and better for some. ${way}${averaged}`
        : `A line is a trained model over all objectives. Dashed grey ones are dominated: another is at least as good for every chosen objective and better for some.${averaged}`;
    },
    draw(width, look, exporting) {
      const chosen = visibleObjectives();
      if (chosen.length < 2) return "Choose at least two objectives in the bar above.";
      const points = frontPoints(state.measure);
      if (!points.length) return `No ${measureName(state.measure)} was measured for what is chosen.`;
      const methods = frontMethods().filter((m) => points.some((p) => p.method === m));
      const unit = measureName(state.measure);
      if (state.view === "all" && chosen.length > 2) {
        const values = points.flatMap((p) => chosen.map((s) => p.all[s]));
        const log = state.axis === "log" && values.some((v) => v > 0);
        return drawLines(
          {
            title,
            panels: [
              {
                series: points.map((p) => ({
                  name: p.name,
                  points: chosen.map((s) => [s + 1, p.all[s], s + 1]),
                  color: p.kept ? ofMethod(p.method, look) : look.faint,
                  dash: p.kept ? "" : "4 3",
                  keys: groupKeys(p.group),
                })),
              },
            ],
            x: { label: "objective, by its number", word: "objective", whole: true },
            y: { label: unit, log },
          },
          width,
          look,
          exporting,
        );
      }
      const [x, y] = objectives.length === 2 ? chosen : [state.x, state.y];
      const axis = (s) => ({
        label: `${unit}, ${cut(objectives[s], 200)}`,
        word: objectives[s],
        log: state.axis === "log" && points.some((p) => p.all[s] > 0),
      });
      const corner = state.measure === start && data.front.reference;
      return drawScatter(
        {
          title,
          methods,
          joined: objectives.length === 2,
          points: points.map((p) => ({ ...p, x: p.all[x], y: p.all[y] })),
          corner: corner ? [corner[x], corner[y]] : null,
          x: axis(x),
          y: axis(y),
        },
        width,
        look,
        exporting,
      );
    },
    below: () =>
      objectives.length > 2
        ? el(
            "details",
            { class: "spokes" },
            el("summary", {}, "Which number is which objective"),
            el(
              "ol",
              {},
              objectives.map((name) => el("li", {}, name)),
            ),
          )
        : null,
  });
}

/** The points as numbers: preference, where it ended, whether it is dominated. */
function frontTable() {
  const measure = measures.includes(data.front.measure) ? data.front.measure : "loss";
  const points = frontPoints(measure),
    few = objectives.length <= 6;
  const shown = few ? objectives.map((_, s) => s) : [];
  const head = [
    "run",
    ...shown.map((s) => `preference ${objectives[s]}`),
    ...(few ? shown.map((s) => `${measureName(measure)} ${objectives[s]}`) : [`mean ${measureName(measure)}`]),
    "dominated",
  ];
  return table(
    head,
    points.map((p) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, p.name),
        shown.map((s) => el("td", {}, fmt(p.preference[s], 3))),
        few ? shown.map((s) => el("td", {}, fmt(p.all[s]))) : el("td", {}, fmt(mean(p.all))),
        el("td", {}, p.kept ? "" : "yes"),
      ),
    ),
    "Trained models of the front",
  );
}

function tradeOffs() {
  const volumes = Object.entries(data.front.hypervolume || {});
  const words = volumes.map(
    ([method, v]) =>
      `${method} ${fmt(v.value, 6)}${v.exact ? "" : " (an estimate)"}${v.beyond ? `, ${many(v.beyond, "point")} beyond the reference and without effect` : ""}`,
  );
  const lead = volumes.length
    ? `Hypervolume up to the reference point ${listed(objectives.map((name, s) => `\`${name}\` ${fmt(data.front.reference[s])}`).slice(0, 6))}${objectives.length > 6 ? " …" : ""}: ${listed(words)}.${volumes.some(([, v]) => v.seeds > 1) ? " Means over seeds." : ""}`
    : "No reference point was given, so there is no hypervolume: one without the other means nothing.";
  section(
    "front",
    "What can be traded",
    `These runs differ in the preference that they were trained with. ${lead}`,
    frontCard(),
    el("details", {}, el("summary", {}, "The points as a table"), frontTable()),
  );
}
