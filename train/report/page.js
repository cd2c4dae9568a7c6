// Text from a model or a data set is inserted as text (textContent), never as markup.
"use strict";

const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const show = (id) => document.getElementById(id);
const round = (value) => String(Math.round(value * 1000) / 1000);

async function unpack() {
  const bytes = Uint8Array.from(atob(show("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function views(data) {
  // Each view has a name and items; an item is a question with the rollouts that are shown side by side.
  const made = [];
  const validated = data.rollouts.filter((r) => r.mode === "val");
  const steps = [...new Set(validated.map((r) => r.step))].sort((a, b) => a - b);
  const pairs = [...new Set(validated.map((r) => r.task))].map((task) => {
    const own = validated.filter((r) => r.task === task).sort((a, b) => a.step - b.step);
    const before = own[0], after = own.length > 1 ? own[own.length - 1] : undefined;
    return { task, rollouts: after ? [before, after] : [before], before: before.reward, after: after && after.reward };
  });
  const won = pairs.filter((p) => p.rollouts.length > 1 && (p.after || 0) > (p.before || 0));
  const lost = pairs.filter((p) => p.rollouts.length > 1 && (p.after || 0) < (p.before || 0));
  const wrong = pairs.filter((p) => !(p.rollouts[p.rollouts.length - 1].reward >= 1));
  const two = steps.length > 1;
  if (pairs.length) made.push({ key: "val", name: two ? "Validation, before and after" : "Validation", items: pairs });
  if (won.length) made.push({ key: "won", name: "… better than before", items: won });
  if (lost.length) made.push({ key: "lost", name: "… worse than before", items: lost });
  if (wrong.length) made.push({ key: "wrong", name: two ? "… below 1 after" : "… below 1", items: wrong });
  const traced = data.rollouts.filter((r) => r.mode === null);
  const repeated = [...new Set(traced.map((r) => r.task))].map((task) => ({ task, rollouts: traced.filter((r) => r.task === task) }));
  const slipped = traced.filter((r) => r.why || r.turns.some((step) => !step.ok));
  if (traced.length) made.push({ key: "traces", name: data.view || "Traces", items: repeated });
  if (slipped.length) made.push({ key: "slips", name: "… with an error or a correction", items: slipped.map((r) => ({ task: r.task, rollouts: [r] })) });
  const failed = data.rollouts.filter((r) => r.status !== "succeeded");
  if (failed.length) made.push({ key: "failed", name: "Failed", items: failed.map((r) => ({ task: r.task, rollouts: [r] })) });
  const training = data.rollouts.filter((r) => r.mode === "train" && r.reward !== null);
  for (const step of [...new Set(training.map((r) => r.step))]) {
    const groups = new Map();
    training.filter((r) => r.step === step).forEach((r) => groups.set(r.task, [...(groups.get(r.task) || []), r]));
    const items = [...groups].map(([task, rollouts]) => ({ task, rollouts }));
    made.push({ key: "step" + step, name: "Training, step " + step, items });
  }
  return made;
}

function badge(rollout, prefix) {
  if (!rollout) return make("span", "badge", prefix + "not run");
  if (rollout.status !== "succeeded") {
    return make("span", "badge bad", rollout.status + (rollout.reward === null ? "" : ", reward " + round(rollout.reward)));
  }
  if (rollout.reward === null) return make("span", "badge", "no score");
  const kind = rollout.reward >= 1 ? "badge good" : "badge";
  return make("span", kind, prefix + round(rollout.reward));
}

function badges(item) {
  const row = make("div", "badges");
  if (item.rollouts[0].mode === "val" && item.rollouts.length === 2) {
    row.append(badge(item.rollouts[0], "before "), badge(item.rollouts[1], "after "));
  } else if (item.rollouts.length > 2 && item.rollouts.every((r) => r.reward !== null)) {
    const all = item.rollouts.length, right = item.rollouts.filter((r) => r.reward === 1).length;
    const binary = item.rollouts.every((r) => r.reward === 0 || r.reward === 1);
    const mean = item.rollouts.reduce((sum, r) => sum + r.reward, 0) / all;
    const text = binary ? right + " of " + all + " right" : all + " rollouts, mean reward " + round(mean);
    row.append(make("span", right === all ? "badge good" : "badge", text));
  } else {
    item.rollouts.forEach((r) => row.append(badge(r, "")));
  }
  return row;
}

function tokens(data, rollout) {
  const box = make("div");
  const note = "The highlighted tokens were sampled and carry the loss; the others are the prompt. Hover for ids.";
  box.append(make("p", "soft", rollout.tokens.length ? note : "No token of this rollout is trained on."));
  rollout.tokens.forEach((runs) => {
    const line = make("div", "tokens");
    for (const [sampled, ids] of runs) {
      if (sampled < 0) {
        line.append(make("u", "", " … " + ids[0] + " tokens … "));
        continue;
      }
      for (const id of ids) {
        const [number, text] = data.words[id];
        const token = make(sampled ? "b" : "i", "", text);
        token.title = String(number);
        line.append(token);
      }
    }
    box.append(line);
    requestAnimationFrame(() => {
      const first = line.querySelector("b");
      if (first) line.scrollTop = first.offsetTop - 60;
    });
  });
  return box;
}

function lazy(label, fill) {
  const box = make("details");
  box.append(make("summary", "", label));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(fill());
  });
  return box;
}

function turn(step) {
  const box = make("div", step.ok ? "turn" : "turn failed");
  const tool = step.kind === "tool";
  box.append(make("b", "", step.agent + (tool ? " ran" : " wrote") + (step.ok ? "" : ", which failed")));
  if (tool) {
    box.append(make("pre", "", step.input), make("span", "soft", "result"), make("pre", "", step.output));
  } else {
    box.append(make("pre", "", step.output));
    box.append(lazy("prompt", () => make("pre", "", step.input)));
  }
  return box;
}

function card(data, rollout, title) {
  const box = make("article", "card");
  const head = make("header");
  head.append(make("h4", "", title), badge(rollout, "reward "));
  const parts = Object.entries(rollout.reward_components);
  if (parts.length > 1) parts.forEach(([name, value]) => head.append(make("span", "badge", name + " " + round(value))));
  box.append(head);
  if (rollout.why) box.append(make("p", "why", rollout.why));
  rollout.credit.forEach((line) => box.append(make("p", "soft", line)));
  if (rollout.input) box.append(lazy("input", () => make("pre", "", rollout.input)));
  rollout.turns.forEach((step) => box.append(turn(step)));
  if (rollout.judged_field) box.append(make("span", "soft", "judged: " + rollout.judged_field));
  if (!rollout.turns.length || rollout.judged_field)
    box.append(make("pre", "", rollout.answer || rollout.message || "no answer"));
  if (rollout.tokens) box.append(lazy("tokens and loss mask", () => tokens(data, rollout)));
  box.append(make("p", "soft", rollout.id + " · " + rollout.seconds + " s"));
  return box;
}

function titleOf(item, rollout, place) {
  if (rollout.mode === "val") {
    const when = item.rollouts.length > 1 ? (place ? "After" : "Before") : "Validation";
    return when + " (step " + rollout.step + ")";
  }
  if (rollout.mode === null) return "Trace " + (place + 1);
  return item.rollouts.length > 1 ? "Rollout " + (place + 1) : "Training, step " + rollout.step;
}

function detail(data, item) {
  const task = data.tasks[item.task];
  const box = document.createDocumentFragment();
  const back = make("button", "back", "← all questions");
  back.addEventListener("click", () => choose({ task: "" }));
  box.append(back, make("h3", "", task.question));
  const about = make("div", "badges");
  about.append(make("span", "badge", item.task));
  Object.values(task.about).forEach((value) => about.append(make("span", "badge", value)));
  box.append(about);
  if (task.gold) {
    const gold = make("details");
    gold.open = true;
    gold.append(make("summary", "", "gold answer"), make("pre", "", task.gold));
    box.append(gold);
  }
  const pair = make("div", "pair");
  item.rollouts.forEach((r, place) => pair.append(card(data, r, titleOf(item, r, place))));
  box.append(pair);
  return box;
}

// The open item is in the address, so a reload or a link shows it again.
const chosen = () => new URLSearchParams(location.hash.slice(1));
function choose(changes) {
  const now = chosen();
  Object.entries(changes).forEach(([name, value]) => now.set(name, value));
  location.hash = now.toString();
}

function start(data) {
  const all = views(data);
  if (!all.length) {
    show("browser").replaceChildren(make("p", "soft", "No rollout has been written yet."));
    return;
  }
  const select = show("view"), search = show("search"), list = show("list"), pane = show("detail");
  all.forEach((view) => {
    const option = make("option", "", view.name + " (" + view.items.length + ")");
    option.value = view.key;
    select.append(option);
  });
  const draw = () => {
    const view = all.find((v) => v.key === chosen().get("view")) || all[0];
    select.value = view.key;
    const words = search.value.toLowerCase();
    const text = (item) => (item.task + " " + data.tasks[item.task].question + " " + JSON.stringify(item.rollouts)).toLowerCase();
    const items = view.items.filter((item) => !words || text(item).includes(words));
    const wanted = chosen().get("task"), phone = matchMedia("(max-width: 760px)").matches;
    const key = (item) => item.rollouts[0].id;
    const open = items.find((item) => key(item) === wanted) || (phone ? undefined : items[0]);
    list.replaceChildren(...items.map((item) => {
      const entry = make("button", "", data.tasks[item.task].question);
      entry.append(badges(item));
      if (item === open) entry.setAttribute("aria-current", "true");
      entry.addEventListener("click", () => choose({ view: view.key, task: key(item) }));
      return entry;
    }));
    if (!items.length) list.append(make("p", "", "no match"));
    show("browser").classList.toggle("open", Boolean(open));
    pane.replaceChildren(open ? detail(data, open) : "");
  };
  select.addEventListener("change", () => choose({ view: select.value, task: "" }));
  search.addEventListener("input", draw);
  addEventListener("hashchange", () => {
    const top = list.scrollTop;
    draw();
    list.scrollTop = top;
    if (matchMedia("(max-width: 760px)").matches) show("browser").scrollIntoView();
  });
  draw();
}

unpack().then(start, (error) => {
  show("browser").replaceChildren(make("p", "warning", "This browser cannot unpack the rollouts: " + error));
});
