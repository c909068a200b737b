// A chart on the page: its words, its controls, what is under the pointer, and its export.

const cards = [];
const tip = document.getElementById("tip");
const MOST_ROWS = 12;

function showTip(card, found) {
  const swatch = (row) => {
    const s = el("i", { class: "swatch" });
    s.style.background = row.color || "transparent";
    return s;
  };
  const rows = found.rows || [];
  tip.replaceChildren(
    el("b", {}, found.title),
    ...rows
      .slice(0, MOST_ROWS)
      .map((row) =>
        el(
          "div",
          { class: row.first ? "row first" : "row" },
          swatch(row),
          el("span", {}, row.name),
          el("em", {}, row.text),
        ),
      ),
    rows.length > MOST_ROWS ? el("div", { class: "more" }, `… ${rows.length - MOST_ROWS} more`) : "",
  );
  tip.hidden = false;
  const area = card.stage.getBoundingClientRect(),
    box = tip.getBoundingClientRect();
  let x = area.left + found.x + 16,
    y = area.top + found.y + 6;
  if (x + box.width > document.documentElement.clientWidth - 8) x = area.left + found.x - box.width - 16;
  x = Math.max(8, Math.min(x, document.documentElement.clientWidth - box.width - 8));
  y = Math.max(8, Math.min(y, window.innerHeight - box.height - 8));
  tip.style.left = `${x}px`;
  tip.style.top = `${y}px`;
}
const hideTip = () => {
  tip.hidden = true;
};

/** The sentence in place of what could not be drawn; the console has the whole error. */
function failed(what, error) {
  console.error(error);
  return `This ${what} could not be drawn: ${error.message}.`;
}

/** A figure: {id, title, say, controls, draw(width, look, exporting), below()}.
 *  `draw` gives a chart, or a sentence that says why there is none. `say` may be a function. */
function makeCard({ id, title, say, controls = [], draw, below, wide }) {
  const stage = el("div", { class: "stage" });
  const words = el("p", { class: "say" });
  const under = el("div", { class: "under" });
  const button = (kind, act) =>
    el(
      "button",
      {
        type: "button",
        class: "save",
        "aria-label": `Save “${title}” as ${kind}`,
        title: `Save as ${kind}`,
        onclick: act,
      },
      kind,
    );
  const card = { id, title, stage, drawn: null, width: 0 };
  const saves = el(
    "div",
    { class: "saves" },
    button("SVG", () => download(`${id}.svg`, new Blob([exportSvg(card)], { type: "image/svg+xml" }))),
    button("PNG", () => exportPng(card)),
  );
  card.node = el(
    "figure",
    { class: wide ? "card wide" : "card", id: `chart-${id}` },
    el("div", { class: "card-head" }, el("h3", {}, title), saves),
    words,
    controls.length
      ? el(
          "div",
          { class: "controls" },
          controls.map((c) => c.node || c),
        )
      : null,
    stage,
    under,
  );
  card.draw = draw;
  card.render = () => {
    const width = Math.floor(stage.clientWidth);
    if (!width) return;
    card.width = width;
    let chart;
    try {
      words.replaceChildren(...prose(typeof say === "function" ? say() : say || ""));
      chart = draw(width, theme(), false);
    } catch (error) {
      chart = failed("chart", error);
    }
    if (typeof chart === "string") {
      card.drawn = null;
      stage.replaceChildren(el("p", { class: "nothing" }, prose(chart)));
    } else {
      card.drawn = chart;
      chart.svg.setAttribute("tabindex", "0");
      stage.replaceChildren(chart.svg);
    }
    saves.hidden = !card.drawn;
    under.replaceChildren(...[below ? below() : []].flat().filter(Boolean));
  };
  const look = (event) => {
    if (!card.drawn) return;
    const area = stage.getBoundingClientRect();
    const found = card.drawn.probe(event.clientX - area.left, event.clientY - area.top);
    if (found) showTip(card, found);
    else hideTip();
  };
  stage.addEventListener("pointermove", look);
  stage.addEventListener("pointerdown", look);
  const leave = () => {
    if (card.drawn) card.drawn.clear();
    hideTip();
  };
  stage.addEventListener("pointerleave", leave);
  stage.addEventListener("focusout", leave);
  stage.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!by || !card.drawn || !card.drawn.step) return;
    event.preventDefault();
    const found = card.drawn.step(by);
    if (found) showTip(card, found);
  });
  cards.push(card);
  return card.node;
}

function renderAll() {
  hideTip();
  cards.forEach((card) => card.render());
}

// ---- export ----------------------------------------------------------------------------------

/** A chart as the text of an SVG file that needs nothing else: light, titled, with its legend. */
function exportSvg(card) {
  const chart = card.draw(760, THEMES.light, true);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(chart.svg)}\n`;
}
function download(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
function exportPng(card) {
  const address = URL.createObjectURL(new Blob([exportSvg(card)], { type: "image/svg+xml" }));
  const image = new Image();
  image.onload = () => {
    const sheet = el("canvas", { width: image.width * 2, height: image.height * 2 });
    const pen = sheet.getContext("2d");
    pen.scale(2, 2);
    pen.drawImage(image, 0, 0);
    URL.revokeObjectURL(address);
    sheet.toBlob((blob) => download(`${card.id}.png`, blob));
  };
  image.src = address;
}

// ---- controls --------------------------------------------------------------------------------

/** Buttons of which one is pressed. */
function choice(label, options, value, act) {
  const control = { value };
  const buttons = options.map(([key, name]) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": String(key === value),
        "data-value": key,
        onclick: () => {
          control.value = key;
          buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.value === String(key))));
          act(key);
        },
      },
      name,
    ),
  );
  control.node = el("div", { class: "choice", role: "group", "aria-label": label }, buttons);
  return control;
}
/** A drop-down list. */
function pick(label, options, value, act) {
  const control = { value };
  const select = el(
    "select",
    {
      "aria-label": label,
      onchange: () => {
        control.value = select.value;
        act(select.value);
      },
    },
    options.map(([key, name]) => el("option", { value: key, selected: String(key) === String(value) }, name)),
  );
  control.node = el("label", { class: "pick" }, el("span", {}, label), select);
  control.select = select;
  return control;
}
/** A slider over the places of a list. */
function slide(label, places, at, act) {
  const control = { at };
  const said = el("output", {}, String(places[at]));
  const input = el("input", {
    type: "range",
    min: 0,
    max: Math.max(places.length - 1, 0),
    value: at,
    step: 1,
    "aria-label": label,
    oninput: () => {
      control.at = Number(input.value);
      said.textContent = String(control.places[control.at]);
      input.setAttribute("aria-valuetext", `round ${control.places[control.at]}`);
      act(control.at);
    },
  });
  control.places = places;
  control.reset = (next, index) => {
    control.places = next;
    control.at = index;
    input.max = Math.max(next.length - 1, 0);
    input.value = index;
    said.textContent = next.length ? String(next[index]) : "";
  };
  control.node = el("label", { class: "slide" }, el("span", {}, label), input, said);
  return control;
}
