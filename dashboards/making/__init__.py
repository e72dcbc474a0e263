"""Makes Grafana's boards, their pictures and the page of metrics from `monitors.export`. No run needs it."""
