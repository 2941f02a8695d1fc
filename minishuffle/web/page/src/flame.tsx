// Where a subtask spends its time, as `minishuffle profile` says it: a flame graph, and its functions in a table.
import { useMemo, useRef, useState } from "preact/hooks";
import type { Task } from "./api";
import { read, Refused } from "./api";
import { count, percent } from "./format";
import { Empty, Table } from "./parts";

const SECONDS = 5;
const ANSWER_MS = 15_000;
/** The share of what is shown below which a call is left out. */
const SHOWN_FROM = 0.002;
const FUNCTIONS_SHOWN = 10;
const ROW_PX = 22;
const SHADES = 3;

type Kind = "operator" | "wait" | "runtime" | "code";
interface Frame {
  function: string;
  kind: Kind;
  file: string;
  line: number;
}
export interface Profile {
  task: string;
  why: string;
  seconds: number;
  cpu_seconds: number;
  samples: Record<string, number>;
  left_out: number;
  frames: Frame[];
  stacks: { samples: number; frames: number[] }[];
}

/** A function in one place of the tree; `lines` are the samples of each of its lines. */
interface Called {
  key: string;
  frame: Frame;
  samples: number;
  own: number;
  lines: Map<number, number>;
  inner: Called[];
}

const ALL: Frame = { function: "all", kind: "operator", file: "", line: 0 };
const called = (frame: Frame, key: string): Called => ({ key, frame, samples: 0, own: 0, lines: new Map(), inner: [] });

function add(to: Called, frame: Frame, samples: number, innermost: boolean): void {
  to.samples += samples;
  if (innermost) to.own += samples;
  to.lines.set(frame.line, (to.lines.get(frame.line) ?? 0) + samples);
}

const same = (one: Frame, other: Frame) => one.function === other.function && one.file === other.file;

/** What calls what. Code of the runtime that only calls on is passed over, unless all is to be shown. */
function tree(profile: Profile, whole: boolean): Called {
  const root = called(ALL, "");
  for (const stack of profile.stacks) {
    const last = stack.frames.length - 1;
    const frames = stack.frames.map((each) => profile.frames[each]!).filter((each, at) => whole || each.kind !== "runtime" || at === last);
    root.samples += stack.samples;
    let at = root;
    frames.forEach((frame, depth) => {
      let next = at.inner.find((each) => same(each.frame, frame));
      if (next === undefined) {
        next = called(frame, `${at.key}/${at.inner.length}`);
        at.inner.push(next);
      }
      add(next, frame, stack.samples, depth === frames.length - 1);
      at = next;
    });
  }
  ordered(root);
  return root;
}

function ordered(node: Called): void {
  node.inner.sort((one, other) => other.samples - one.samples);
  node.inner.forEach(ordered);
}

/** All functions wherever they are called, that with the most time of its own first. */
function functions(profile: Profile): Called[] {
  const found = new Map<string, Called>();
  for (const stack of profile.stacks) {
    const frames = stack.frames.map((each) => profile.frames[each]!);
    const last = new Map(frames.map((frame) => [`${frame.function}\n${frame.file}`, frame]));
    for (const [key, frame] of last) {
      const at = found.get(key) ?? called(frame, key);
      found.set(key, at);
      add(at, frame, stack.samples, frame === frames.at(-1));
    }
  }
  return [...found.values()].filter((each) => each.own > 0).sort((one, other) => other.own - one.own);
}

function place(node: Called): string {
  const [line] = [...node.lines].reduce((best, each) => (each[1] > best[1] ? each : best), [0, -1]);
  return node.frame.file === "" ? "" : `${node.frame.file}:${line}`;
}

function described(node: Called, total: number): string {
  const where = place(node);
  return `${node.frame.function}${where && `, ${where}`}: ${percent(node.samples / total)} of the samples, ${percent(node.own / total)} in itself`;
}

export function ProfileOf({ job, tasks, busiest }: { job: string; tasks: Task[]; busiest: number }) {
  const [picked, pick] = useState<number | null>(null);
  const [found, set] = useState<Profile | null>(null);
  const [state, say] = useState<"" | "sampling" | { failed: string }>("");
  const running = tasks.filter((task) => task.state === "running");
  const chosen = running.find((task) => task.index === (picked ?? busiest)) ?? running[0];

  async function take(task: Task) {
    say("sampling");
    try {
      set(await read<Profile>(`jobs/${job}/profile?operator=${task.operator}&index=${task.index}&seconds=${SECONDS}`, undefined, ANSWER_MS));
      say("");
    } catch (error) {
      say({ failed: error instanceof Refused ? error.message : "the coordinator did not answer" });
    }
  }

  return (
    <div class="profile">
      <h3>Profile</h3>
      {chosen === undefined ? (
        <Empty>no subtask of this vertex runs</Empty>
      ) : (
        <p class="take">
          <label>
            Subtask{" "}
            <select value={chosen.index} onChange={(event) => pick(Number(event.currentTarget.value))}>
              {running.map((task) => (
                <option key={task.index} value={task.index}>
                  {task.index}
                  {task.index === busiest && " (busiest)"}
                </option>
              ))}
            </select>
          </label>
          <button type="button" disabled={state === "sampling"} onClick={() => void take(chosen)}>
            Profile {SECONDS} s
          </button>
          <span role="status" class="quiet">
            {state === "sampling" && `looking at the thread of ${chosen.name}[${chosen.index}] 50 times a second …`}
          </span>
        </p>
      )}
      {typeof state === "object" && <p class="failure">{state.failed}</p>}
      {found !== null && <Shown profile={found} />}
    </div>
  );
}

function Shown({ profile }: { profile: Profile }) {
  const [whole, showWhole] = useState(false);
  const root = useMemo(() => tree(profile, whole), [profile, whole]);
  const total = Object.values(profile.samples).reduce((sum, each) => sum + each, 0);
  const share = (state: string) => percent((profile.samples[state] ?? 0) / Math.max(1, total));
  if (root.samples === 0) return <Empty>no sample was taken{profile.why && `: ${profile.why}`}</Empty>;
  return (
    <>
      <p>
        <strong>{profile.task}</strong>: {count(total)} samples in {profile.seconds.toFixed(1)} s{profile.why && `, then ${profile.why}`}; busy {share("busy")}{" "}
        (on a processor {percent(profile.cpu_seconds / profile.seconds)}), waits for input {share("idle")}, for output {share("backpressured")}
        {profile.left_out > 0 && `; ${count(profile.left_out)} samples are of stacks beyond the limit, and not shown`}.
      </p>
      <label>
        <input type="checkbox" checked={whole} onChange={(event) => showWhole(event.currentTarget.checked)} /> Show code of minishuffle that only calls on
      </label>
      <Flame key={String(whole)} root={root} />
      <Functions profile={profile} total={total} />
    </>
  );
}

interface Box {
  node: Called;
  parent: Called | null;
  depth: number;
  left: number;
  width: number;
}

/** The boxes that are seen when `top` is as wide as all: those above it, and what it calls. */
function boxes(root: Called, top: Called): Box[] {
  const found: Box[] = [];
  const path: Called[] = [];
  for (let at = root; at !== top; at = at.inner.find((each) => top.key === each.key || top.key.startsWith(`${each.key}/`))!) path.push(at);
  path.forEach((node, depth) => found.push({ node, parent: path[depth - 1] ?? null, depth, left: 0, width: 1 }));
  function lay(node: Called, parent: Called | null, depth: number, left: number): void {
    const width = node.samples / top.samples;
    if (width < SHOWN_FROM) return;
    found.push({ node, parent, depth, left, width });
    let at = left;
    for (const each of node.inner) {
      lay(each, node, depth + 1, at);
      at += each.samples / top.samples;
    }
  }
  lay(top, path.at(-1) ?? null, path.length, 0);
  return found;
}

const shade = (name: string) => [...name].reduce((sum, each) => sum + each.charCodeAt(0), 0) % SHADES;

/** Boxes as wide as their samples, callers above what they call. A click makes one as wide as all. */
function Flame({ root }: { root: Called }) {
  const [top, zoom] = useState(root);
  const [at, look] = useState(root);
  const drawing = useRef<HTMLDivElement>(null);
  const shown = useMemo(() => boxes(root, top), [root, top]);
  const focused = shown.some((each) => each.node === at) ? at : top;
  const depth = Math.max(...shown.map((each) => each.depth));

  function go(to: Called | null | undefined): void {
    if (to === null || to === undefined) return;
    look(to);
    drawing.current?.querySelector<HTMLElement>(`[data-key="${to.key}"]`)?.focus();
  }
  function onKeyDown(event: KeyboardEvent): void {
    const here = shown.find((each) => each.node === focused)!;
    const beside = shown.filter((each) => each.depth === here.depth);
    const moves: Record<string, () => void> = {
      ArrowUp: () => go(here.parent),
      ArrowDown: () => go(shown.find((each) => each.parent === here.node)?.node),
      ArrowLeft: () => go(beside[beside.indexOf(here) - 1]?.node),
      ArrowRight: () => go(beside[beside.indexOf(here) + 1]?.node),
      Escape: () => zoom(root),
    };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    move();
  }
  return (
    <>
      <div
        ref={drawing}
        class="flame"
        role="group"
        aria-label="Flame graph: arrow keys move, Enter zooms in, Escape shows all"
        style={{ height: `${(depth + 1) * ROW_PX}px` }}
        onKeyDown={onKeyDown}
      >
        {shown.map(({ node, depth: row, left, width }) => (
          <button
            key={node.key}
            type="button"
            data-key={node.key}
            class={`box ${node.frame.kind} s${shade(node.frame.function)}`}
            style={{ top: `${row * ROW_PX}px`, left: `${left * 100}%`, width: `${width * 100}%` }}
            tabIndex={node === focused ? 0 : -1}
            aria-label={described(node, root.samples)}
            title={described(node, root.samples)}
            onClick={() => zoom(node)}
            onFocus={() => look(node)}
            onMouseEnter={() => look(node)}
          >
            {node.frame.function}
          </button>
        ))}
      </div>
      <p class="quiet looked">{described(focused, root.samples)}</p>
    </>
  );
}

function Functions({ profile, total }: { profile: Profile; total: number }) {
  const found = useMemo(() => functions(profile), [profile]);
  return (
    <Table label={`Functions of ${profile.task} by their own time`}>
      <thead>
        <tr>
          <th class="number">Own</th>
          <th class="number">All</th>
          <th>Function</th>
          <th class="wide">Place</th>
        </tr>
      </thead>
      <tbody>
        {found.slice(0, FUNCTIONS_SHOWN).map((each) => (
          <tr key={each.key}>
            <td class="number">{percent(each.own / total)}</td>
            <td class="number">{percent(each.samples / total)}</td>
            <th scope="row">{each.frame.function}</th>
            <td class="wide">{place(each)}</td>
          </tr>
        ))}
      </tbody>
    </Table>
  );
}
