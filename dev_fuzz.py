import sys, json, os, time
sys.path.insert(0, "src"); os.environ["PYTHONPATH"] = "src"
from openmla.testing.fuzz import run_fuzz
cases, seed, variants = map(int, sys.argv[1:4])
t = time.time()
def tell(done, total, note):
    if done % 500 == 0: print(done, round(time.time() - t), flush=True)
r = run_fuzz(cases, seed, device="cuda", jobs=18, variants=variants, progress=tell, save_dir=os.environ["OUT"] + "/f", max_failures=40)
print(r.summary()); print(r.ok, dict(r.served), r.worst)
for why, n in r.refused.most_common(40): print(n, why[:250])
for f in r.failures: print(f.kind, str(f.case), "| shrunk", str(f.shrunk), "|", f.message[:600])
json.dump(r.to_json(), open(f"{os.environ['OUT']}/fuzz-{seed}.json", "w"), indent=1)
