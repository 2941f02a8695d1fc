// What the coordinator's REST interface gives, and how it is asked again and again.
import { useEffect, useReducer, useRef, useState } from "preact/hooks";

export type Level = "OK" | "LOW" | "HIGH" | "BEHIND";

export interface Counters {
  records_in: number;
  records_out: number;
  bytes_in: number;
  bytes_out: number;
  busy_seconds: number;
  idle_seconds: number;
  backpressured_seconds: number;
  state_rows: number;
  user_errors: Record<string, number>;
  /** Microseconds since 1970; null: none yet. */
  watermark: number | null;
  latency: { count?: number; p50?: number; p95?: number; p99?: number; max?: number };
  /** Local snapshots, in a job with a guarantee; seconds. */
  snapshot: { taken?: number; bytes?: number; seconds?: number; age?: number };
}
export interface Task {
  operator: number;
  name: string;
  index: number;
  attempt: number;
  state: string;
  worker: number;
  /** The worker that holds its snapshots; 0: none. */
  holder: number;
  counters: Counters;
}
export interface Cause {
  text: string;
  traceback: string;
  task: string;
}
export interface Job {
  job: string;
  name: string;
  state: string;
  submitted_at: number;
  ended_at: number;
  /** When the coordinator said all this, by its clock. */
  at: number;
  tasks: Task[];
  causes: Cause[];
  slot_waits: { worker: number; until: number; text: string }[];
  deploy_waits: { operators: number[]; text: string }[];
  restarts: Record<string, number>;
  rows_dropped: Record<string, number>;
  rows_in_flight: number;
  state_rows_lost: number;
  files_listed: number;
  file_rows: number;
  task_states: Record<string, number>;
  rows_again: number;
}
export interface Worker {
  worker: number;
  state: string;
  host: string;
  pid: number;
  data_port: number;
  metrics_port: number;
  slots: number;
  slots_free: number;
  standby: boolean;
  draining: boolean;
  heartbeat_age_seconds: number;
  report: {
    network_cap_bytes: number;
    network_peak_bytes: number;
    segments_free: number;
    abandoned_tasks: number;
    loop_lag_p99_seconds: number;
    loop_lag_seconds: number;
  };
}
export interface Cluster {
  cluster: string;
  version: string;
  term: number;
  pid: number;
  journal_problem: string;
  workers: Worker[];
}
export interface Graph {
  job: string;
  vertices: { name: string; parallelism: number; operators: string[]; is_source: boolean; sink: string }[];
  edges: { source: number; target: number; input: number; partitioner: string; kind: string }[];
  restart_strategy: "individual" | "region" | "full" | "none";
  on_unavailable: "drop" | "wait";
  /** Values are empty where the job has the runtime choose. */
  settings: { name: string; value: string; default: string; given: boolean }[];
}
export interface SubtaskLoad {
  index: number;
  worker: number;
  state: string;
  busy: number;
  backpressured: number;
  records_in: number;
  records_out: number;
}
export interface VertexLoad extends Omit<SubtaskLoad, "index" | "worker" | "state"> {
  name: string;
  level: Level;
  most_backpressured: number;
  busiest: number;
  subtasks: SubtaskLoad[];
}
export interface Loads {
  vertices: VertexLoad[];
}
export type Evidence = number | string | (number | string | { key: string; share: number })[];
export interface Diagnosis {
  verdict: "healthy" | "waiting" | "throttled";
  task: string;
  rule: string;
  evidence: Record<string, Evidence>;
  advice: string;
}
export interface Gate {
  queue_buffers: number;
  exclusive_used: number;
  exclusive_capacity: number;
  floating_used: number;
  floating_capacity: number;
  channels: number;
  channels_starved: number;
  /** null: TCP alone holds its producers up */
  credits_announced: number | null;
  credits_unannounced: number | null;
  debloated_bytes: number | null;
  in_flight_seconds: number | null;
}
export interface TaskBuffers {
  operator: number;
  index: number;
  attempt: number;
  worker: number;
  gates: Gate[];
  partitions: { backlog_buffers: number; pool: { used: number; capacity: number } }[];
}
export interface Buffers {
  tasks: TaskBuffers[];
  silent: number[];
}
interface DumpedPool {
  in_use: number;
  size: number;
}
export interface DumpedInput {
  producer: number;
  phase: string;
  worker: number;
  queue: number;
  waits_for: string;
  credit?: { announced: number; unannounced: number; exclusive_free: number; exclusive: number; floating_free: number; starved: boolean };
  local?: { lent: number; credit: number };
  /** TCP alone holds the producer up */
  tcp?: { waits_for_buffer: boolean };
}
export interface DumpedOutput {
  consumer: number;
  queue: number;
  backlog: number;
  available: boolean;
  suspected: boolean;
  closed: boolean;
  reader: string;
  credit?: number;
}
export interface Dump {
  workers: {
    tasks: {
      operator: number;
      index: number;
      thread: string;
      seconds: number;
      waits_for: string;
      gates: { from_operator: number; pool: DumpedPool; channels: DumpedInput[]; channels_left_out: number }[];
      partitions: { to_operator: number; pool: DumpedPool | null; channels: DumpedOutput[]; channels_left_out: number }[];
    }[];
  }[];
  silent: number[];
}
export interface EdgeRow {
  at: number;
  producer: number;
  /** null: all subtasks get it. */
  consumer: number | null;
  /** Event time in microseconds since 1970. */
  time: number | null;
  key: string | null;
  /** None of rows that are Python objects. */
  columns: string[];
  values: string[];
}
export interface EdgeRows {
  rows: EdgeRow[];
  producers: number;
  silent: number[];
}
export interface JobEvent {
  number: number;
  at: number;
  kind: string;
  text: string;
  operator: number;
  index: number;
  attempt: number;
  worker: number;
  since: number;
}
type Numbers = (number | null)[];
export interface VertexSamples {
  name: string;
  backpressured: Numbers;
  busy: Numbers;
  records_in: Numbers;
  records_out: Numbers;
}
export interface WorkerSamples {
  worker: number;
  loop_lag: Numbers;
  segments_used: Numbers;
}
export interface History {
  next: number;
  at: number[];
  vertices?: VertexSamples[];
  workers?: WorkerSamples[];
}

const REQUEST_MS = 4000;
const WAIT_SECONDS = 10;
const RETRY_MS = 1000;
const TOKEN = "minishuffle-token";
const EVENTS_KEPT = 5000;
const LINES_KEPT = 20_000;
/** An answer of so many lines is full, so that there may be more. */
const LINES_MANY = 1000;

/** A request that was answered, but not with what was asked for. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

// --- whether the coordinator answers ---------------------------------------------------------------

type Watcher = () => void;
const watchers = new Set<Watcher>();
let silentSince: number | null = null;
let tokenWanted = false;

function heard(): void {
  if (silentSince !== null) {
    silentSince = null;
    watchers.forEach((each) => each());
  }
}

function unheard(): void {
  if (silentSince === null) {
    silentSince = Date.now();
    watchers.forEach((each) => each());
  }
}

/** Since when the coordinator has not answered, and whether it wants a token for reading. */
export function useLink(): { silentSince: number | null; tokenWanted: boolean } {
  const [, again] = useReducer<number, void>((count) => count + 1, 0);
  useEffect(() => {
    const watcher = () => again();
    watchers.add(watcher);
    return () => void watchers.delete(watcher);
  }, []);
  return { silentSince, tokenWanted };
}

export function keptToken(): string | null {
  return sessionStorage.getItem(TOKEN);
}

export function keepToken(token: string | null): void {
  if (token === null) sessionStorage.removeItem(TOKEN);
  else sessionStorage.setItem(TOKEN, token);
  tokenWanted = false;
  watchers.forEach((each) => each());
}

async function request(path: string, method: string, token: string | null, ms: number, stop?: AbortSignal) {
  const headers: Record<string, string> = token === null ? {} : { Authorization: `Bearer ${token}` };
  const timeout = AbortSignal.timeout(ms);
  const signal = stop === undefined ? timeout : AbortSignal.any([stop, timeout]);
  const response = await fetch(`api/v1/${path}`, { method, headers, signal, cache: "no-store" });
  if (response.ok) return await response.json();
  const text = await response.text();
  throw new Refused(response.status, failureText(text));
}

function failureText(text: string): string {
  try {
    return String(JSON.parse(text).text);
  } catch {
    return text.trim();
  }
}

/** Read once. */
export async function read<T>(path: string, stop?: AbortSignal, ms = REQUEST_MS): Promise<T> {
  const token = keptToken();
  try {
    const answer = await request(path, "GET", token, ms, stop);
    heard();
    return answer as T;
  } catch (error) {
    if (error instanceof Refused) {
      heard();
      if (error.status === 401 && !tokenWanted && token === keptToken()) {
        tokenWanted = true;
        watchers.forEach((each) => each());
      }
    } else if (!stop?.aborted) unheard();
    throw error;
  }
}

/** What takes the token: change something, or show rows. The token may be the kept one or one just typed. */
export async function change<T = unknown>(path: string, token: string, ms = REQUEST_MS): Promise<T> {
  return (await request(path, "POST", token, ms)) as T;
}

// --- again and again -------------------------------------------------------------------------------

function pause(ms: number, stop: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, ms);
    function done() {
      clearTimeout(timer);
      stop.removeEventListener("abort", done);
      resolve();
    }
    stop.addEventListener("abort", done);
  });
}

function seen(stop: AbortSignal): Promise<void> {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    function look() {
      if (document.hidden && !stop.aborted) return;
      document.removeEventListener("visibilitychange", look);
      stop.removeEventListener("abort", look);
      resolve();
    }
    document.addEventListener("visibilitychange", look);
    stop.addEventListener("abort", look);
  });
}

/** Run a round again and again while the page is looked at; what it throws ends nothing. */
function useRounds(round: (stop: AbortSignal) => Promise<number>, keys: unknown[]): void {
  useEffect(() => {
    const end = new AbortController();
    void (async () => {
      while (!end.signal.aborted) {
        await seen(end.signal);
        let ms = RETRY_MS;
        try {
          ms = await round(end.signal);
        } catch (error) {
          if (error instanceof Refused && error.status === 404) return;
        }
        if (ms > 0) await pause(ms, end.signal);
      }
    })();
    return () => end.abort();
  }, keys);
}

/** What is at a path, read every so often; `again` reads it at once when it changes. */
export function usePoll<T>(path: string | null, ms: number, again: unknown = null, answerMs = REQUEST_MS): { data: T | null; error: string } {
  const [state, set] = useState<{ path: string | null; data: T | null; error: string }>({ path, data: null, error: "" });
  useRounds(
    async (stop) => {
      if (path === null) return ms;
      try {
        const data = await read<T>(path, stop, answerMs);
        if (!stop.aborted) set({ path, data, error: "" });
      } catch (error) {
        if (error instanceof Refused) set({ path, data: null, error: error.message });
        throw error;
      }
      return ms;
    },
    [path, ms, again, answerMs],
  );
  return state.path === path ? state : { data: null, error: "" };
}

/** Events of a job, as they come. */
export function useEvents(job: string): JobEvent[] {
  const [events, set] = useState<JobEvent[]>([]);
  const last = useRef(0);
  useRounds(
    async (stop) => {
      const path = `jobs/${job}/events?after=${last.current}&wait_seconds=${WAIT_SECONDS}`;
      const found = await read<{ events: JobEvent[]; terminal: boolean }>(path, stop, 2 * REQUEST_MS + WAIT_SECONDS * 1000);
      if (stop.aborted || found.events.length === 0) return RETRY_MS;
      last.current = found.events[found.events.length - 1]!.number;
      set((before) => [...before, ...found.events].slice(-EVENTS_KEPT));
      return 0;
    },
    [job],
  );
  return events;
}

export interface LogLine {
  number: number;
  text: string;
}
interface Log {
  lines: LogLine[];
  /** Earlier lines, which the coordinator does not keep. */
  left: number;
}

/** The lines of a job's log that the coordinator keeps, and new ones as they come. */
export function useLog(job: string): Log {
  const [log, set] = useState<Log>({ lines: [], left: 0 });
  const next = useRef(0);
  useRounds(
    async (stop) => {
      const path = `jobs/${job}/logs?after=${next.current}&wait_seconds=${WAIT_SECONDS}`;
      const found = await read<{ lines: string[]; next: number; terminal: boolean }>(path, stop, 2 * REQUEST_MS + WAIT_SECONDS * 1000);
      if (stop.aborted) return RETRY_MS;
      next.current = found.next; // Less than before where a new coordinator has none of the old lines.
      if (found.lines.length === 0) return found.terminal ? WAIT_SECONDS * 1000 : RETRY_MS;
      const first = found.next - found.lines.length;
      const young = found.lines.map((text, position) => ({ number: first + position, text }));
      set((before) => {
        const old = before.lines.filter((line) => line.number < first);
        const lines = [...old, ...young].slice(-LINES_KEPT);
        return { lines, left: lines[0]!.number };
      });
      return found.lines.length < LINES_MANY ? RETRY_MS : 0;
    },
    [job],
  );
  return log;
}

/** Samples of the last ten minutes, of which only new ones are read. */
export function useHistory(path: string, ms: number): History {
  const kept = useRef<History>({ next: 0, at: [] });
  const [history, set] = useState<History>(kept.current);
  useRounds(
    async (stop) => {
      const found = await read<History>(`${path}?after=${kept.current.next}`, stop);
      if (stop.aborted) return ms;
      kept.current = joined(kept.current, found);
      set(kept.current);
      return ms;
    },
    [path, ms],
  );
  return history;
}

const SAMPLES_KEPT = 300;

function joined(before: History, after: History): History {
  if (after.next < before.next) return after;
  const tail = <T,>(old: T[] | undefined, young: T[], length: number): (T | null)[] =>
    [...(old ?? Array<null>(length).fill(null)), ...young].slice(-SAMPLES_KEPT);
  const length = before.at.length;
  return {
    next: after.next,
    at: [...before.at, ...after.at].slice(-SAMPLES_KEPT),
    vertices: after.vertices?.map((vertex, number) => {
      const was = before.vertices?.[number];
      return {
        name: vertex.name,
        backpressured: tail(was?.backpressured, vertex.backpressured, length),
        busy: tail(was?.busy, vertex.busy, length),
        records_in: tail(was?.records_in, vertex.records_in, length),
        records_out: tail(was?.records_out, vertex.records_out, length),
      };
    }),
    workers: after.workers?.map((worker) => {
      const was = before.workers?.find((each) => each.worker === worker.worker);
      return {
        worker: worker.worker,
        loop_lag: tail(was?.loop_lag, worker.loop_lag, length),
        segments_used: tail(was?.segments_used, worker.segments_used, length),
      };
    }),
  };
}
