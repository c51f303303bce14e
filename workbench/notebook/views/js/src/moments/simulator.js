// The simulator of workbench/graph/read, for one graph: compute in order, the collectives of a group one after another.
export function simulate(d, order) {
  const [computeSlow, collectiveSlow, productDelays] = d.slow;
  const delayed = new Set();
  const [begin, finish, exposed, lanes, issued] = [[], [], [], [], []];
  let now = 0;
  let flying = [];

  function delay(first, ms) { // it begins later, and so do those that are queued behind it
    const from = begin[first];
    for (const i of flying) {
      if (d.group[i] !== d.group[first] || begin[i] < from) continue;
      begin[i] += ms;
      finish[i] += ms;
    }
    lanes[d.group[first]] += ms;
  }

  function contended(ms, product) { // compute beside collectives takes longer, and so do they
    flying = flying.filter((i) => finish[i] > now);
    const late = new Set();
    for (const i of product && productDelays ? flying : []) {
      if (delayed.has(i) || begin[i] < now || begin[i] >= now + ms) continue;
      late.add(i);
      delayed.add(i);
      delay(i, productDelays * (now + ms - begin[i]));
    }
    const sending = flying.filter((i) => !late.has(i));
    if (!sending.length || (computeSlow === 1 && collectiveSlow === 1)) return ms;
    const together = Math.min(ms * computeSlow, Math.max(...sending.map((i) => finish[i])) - now);
    for (const i of sending) {
      finish[i] += Math.min(together, finish[i] - now) * (1 - 1 / collectiveSlow);
      lanes[d.group[i]] = Math.max(lanes[d.group[i]], finish[i]);
    }
    return together + ms - together / computeSlow;
  }

  for (const i of order) {
    const launches = d.group[i] >= 0;
    if (launches) {
      begin[i] = Math.max(now, lanes[d.group[i]] ?? 0);
      finish[i] = lanes[d.group[i]] = begin[i] + d.ms[i];
      flying.push(i);
    }
    const start = d.waits[i];
    const ready = start >= 0 ? finish[start] ?? 0 : 0;
    if (ready > now) {
      exposed[start] = (exposed[start] ?? 0) + ready - now;
      now = ready;
    } else if (!launches) {
      begin[i] = now;
      now = finish[i] = now + contended(d.ms[i], d.heavy[i] && start < 0);
    }
    issued[i] = now;
  }
  const total = order.reduce((end, i) => (d.group[i] >= 0 ? Math.max(end, finish[i]) : end), now);
  return { begin, finish, exposed, issued, total, exposedMs: exposed.reduce((sum, ms) => sum + ms, 0), ...memory(d, order) };
}

// Bytes alive while each node runs, each value freed after its last use; inputs that the caller keeps stay.
export function memory(d, order) {
  const place = [];
  const last = new Map();
  order.forEach((i, at) => {
    place[i] = at;
    last.set(d.owner[i], at);
    for (const j of d.uses[i]) last.set(j, at);
  });
  const change = order.map(() => [0, 0]);
  let alive = 0;
  for (const [i, at] of last) {
    if (d.input[i]) alive += d.size[i];
    else change[place[d.root[i]]][0] += d.size[i];
    if (!d.kept[i]) change[at][1] += d.size[i];
  }
  const curve = change.map(([made, freed]) => {
    alive += made;
    const here = alive;
    alive -= freed;
    return here;
  });
  return { curve, peak: Math.max(...curve) };
}

// The order after node i has passed one matmul, launch or wait to the left (-1) or right (1), with what must go along;
// or the wall: [a node, the node that reads it].
export function moved(d, order, i, way) {
  const line = way < 0 ? order : [...order].reverse(); // both ways are one, mirrored
  const at = line.indexOf(i);
  let to = at - 1;
  while (to >= 0 && !d.heavy[line[to]] && !d.fixed[line[to]]) to -= 1;
  if (to < 0 || d.fixed[line[to]]) return { wall: null };
  const tied = (a, b) => (way < 0 ? d.needs[b].includes(a) : d.needs[a].includes(b)); // b must stay behind a
  const along = [i];
  for (let k = at - 1; k >= to; k -= 1) {
    const needs = along.find((b) => tied(line[k], b));
    if (needs === undefined) continue;
    if (k === to) return { wall: way < 0 ? [line[k], needs] : [needs, line[k]] };
    along.unshift(line[k]);
  }
  const stay = line.slice(to, at).filter((k) => !along.includes(k));
  const found = [...line.slice(0, to), ...along, ...stay, ...line.slice(at + 1)];
  return { order: way < 0 ? found : found.reverse() };
}
