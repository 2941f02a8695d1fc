// The page: which view is shown, and whether the coordinator answers.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Cluster, Job } from "./api";
import { useHistory, useLink, usePoll } from "./api";
import { TokenWanted } from "./cancel";
import { clock, count } from "./format";
import { JobView } from "./job";
import { Jobs, Workers } from "./overview";
import { Empty } from "./parts";

const POLL_MS = 2000;
const NARROW = matchMedia("(max-width: 700px)");

function useHash(): string {
  const [hash, set] = useState(location.hash);
  useEffect(() => {
    const look = () => set(location.hash);
    addEventListener("hashchange", look);
    return () => removeEventListener("hashchange", look);
  }, []);
  return hash;
}

function useNow(): number {
  const [now, set] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => set(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}

function useNarrow(): boolean {
  const [narrow, set] = useState(NARROW.matches);
  useEffect(() => {
    const look = () => set(NARROW.matches);
    NARROW.addEventListener("change", look);
    return () => NARROW.removeEventListener("change", look);
  }, []);
  return narrow;
}

function Page() {
  const link = useLink();
  const now = useNow();
  const narrow = useNarrow();
  const id = useHash().match(/^#\/jobs\/(j\d+)$/)?.[1];
  const { data } = usePoll<Cluster>("cluster", POLL_MS);
  const [cluster, keep] = useState<Cluster | null>(null);
  useEffect(() => {
    if (data !== null) keep(data);
  }, [data]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.querySelector("main")?.focus())}>
        To the content
      </a>
      <header class="bar-top">
        <a class="brand" href="#/">
          minishuffle
        </a>
        {cluster !== null && <Summary cluster={cluster} />}
      </header>
      {link.silentSince !== null && (
        <div class="gone" role="alert">
          <span aria-hidden="true">■</span> The coordinator does not answer since {clock(link.silentSince / 1000)}. What is shown is
          from before; it is asked again every second.
        </div>
      )}
      {cluster !== null && cluster.journal_problem !== "" && (
        <div class="gone" role="alert">
          <span aria-hidden="true">■</span> Submissions are refused, and restarts wait, until it can be written: {cluster.journal_problem}
        </div>
      )}
      <main tabIndex={-1}>
        {link.tokenWanted ? (
          <TokenWanted />
        ) : id !== undefined ? (
          <JobView key={id} id={id} now={now} narrow={narrow} />
        ) : (
          <Overview cluster={cluster} now={now} />
        )}
      </main>
      <footer>
        <a href="metrics">metrics</a> <a href="openapi.json">REST</a> <a href="page/LICENSES.txt">licences</a>
      </footer>
    </>
  );
}

function Summary({ cluster }: { cluster: Cluster }) {
  const alive = cluster.workers.filter((worker) => worker.state === "alive");
  const standby = alive.filter((worker) => worker.standby).length;
  const slots = alive.reduce((sum, worker) => sum + (worker.standby || worker.draining ? 0 : worker.slots), 0);
  const free = alive.reduce((sum, worker) => sum + worker.slots_free, 0);
  return (
    <p class="summary">
      <span>
        cluster <strong>{cluster.cluster}</strong>
      </span>
      <span>
        <strong>{count(alive.length - standby)}</strong> {alive.length - standby === 1 ? "worker" : "workers"}
        {standby > 0 && `, ${count(standby)} on standby`}
      </span>
      <span>
        <strong>{count(free)}</strong> of {count(slots)} slots free
      </span>
      <span class="minor">
        version {cluster.version}, term {cluster.term}
      </span>
    </p>
  );
}

function Overview({ cluster, now }: { cluster: Cluster | null; now: number }) {
  const { data } = usePoll<{ jobs: Job[] }>("jobs", POLL_MS);
  const history = useHistory("workers/history", POLL_MS);
  const [jobs, keep] = useState<Job[] | null>(null);
  useEffect(() => {
    if (data !== null) keep(data.jobs);
  }, [data]);
  useEffect(() => {
    document.title = "minishuffle";
  }, []);
  if (cluster === null || jobs === null) return <Empty>reading the cluster …</Empty>;
  return (
    <>
      <h1 class="hidden">Cluster {cluster.cluster}</h1>
      <Jobs jobs={jobs} now={now} />
      <Workers cluster={cluster} history={history} />
    </>
  );
}

render(<Page />, document.body);
