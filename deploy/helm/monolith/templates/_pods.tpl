{{/* The cluster as TF_CONFIG names it: a pod that is started again keeps its name, and so its address. */}}
{{- define "monolith.cluster" -}}
{{- $servers := list }}
{{- $domain := include "monolith.domain" (dict "root" . "service" (include "monolith.ps" .)) }}
{{- range $index := until (int .Values.ps.replicas) }}
{{- $servers = append $servers (printf "%s-%d.%s:%d" (include "monolith.ps" $) $index $domain (int $.Values.ps.port)) }}
{{- end }}
{{- $workers := list }}
{{- $domain = include "monolith.domain" (dict "root" . "service" (include "monolith.worker" .)) }}
{{- range $index := until (int .Values.workers.replicas) }}
{{- $workers = append $workers (printf "%s-%d.%s:%d" (include "monolith.worker" $) $index $domain (int $.Values.ps.port)) }}
{{- end }}
{{- dict "ps" $servers "worker" $workers | toJson }}
{{- end }}

{{/* Variables of a role; takes a dict of "root", "role" and "label", the label of a pod that has its index. */}}
{{- define "monolith.env" -}}
- name: MONOLITH_INDEX
  valueFrom:
    fieldRef: {fieldPath: {{ printf "metadata.labels['%s']" .label | quote }}}
# Kubernetes puts the index in.
- name: TF_CONFIG
  value: {{ printf `{"cluster": %s, "task": {"type": "%s", "index": $(MONOLITH_INDEX)}}` (include "monolith.cluster" .root) .role | quote }}
- name: MONOLITH_MODEL_DIR
  value: {{ .root.Values.modelDir.path | quote }}
- name: MONOLITH_UUID
  value: {{ printf "%s-%s-%d" .root.Release.Namespace .root.Release.Name (int .root.Values.ps.replicas) | quote }}
# A pod that is lost comes back: wait for it, and restore that one alone.
- name: MONOLITH_PARTIAL_RECOVERY
  value: "true"
- name: MONOLITH_CLIENT
  value: {{ dict "tls_root_certs" "/etc/monolith/tls/ca.crt" | toJson | quote }}
- name: MONOLITH_PS_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "monolith.tokenSecret" .root }}, key: token}
# The root of the file system is read-only; what libraries cache goes where they may write.
- name: HOME
  value: /tmp
{{- range $name, $value := .root.Values.env }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* Variables of a rank: it listens under the name of its pod, which Kubernetes writes into /etc/hosts. */}}
{{- define "monolith.rankEnv" -}}
- name: MONOLITH_SERVER
  value: {{ dict "host" (printf "%s-$(MONOLITH_INDEX).%s" (include "monolith.worker" .) (include "monolith.domain" (dict "root" . "service" (include "monolith.worker" .)))) "tls_cert" "/etc/monolith/tls/tls.crt" "tls_key" "/etc/monolith/tls/tls.key" | toJson | quote }}
{{- if .Values.workers.minRanks }}
- name: MONOLITH_MIN_RANKS
  value: {{ .Values.workers.minRanks | quote }}
{{- end }}
{{- end }}

{{- define "monolith.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What all pods have; takes a dict of "root" and "values", those of the role. */}}
{{- define "monolith.podSpec" -}}
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "monolith.mounts" -}}
- {name: model, mountPath: {{ .Values.modelDir.path }}}
- {name: tls, mountPath: /etc/monolith/tls, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Variables of shards and front ends. */}}
{{- define "monolith.serveEnv" -}}
- name: MONOLITH_PS_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "monolith.tokenSecret" . }}, key: token}
- name: HOME
  value: /tmp
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* Who serves changes nothing of the model. */}}
{{- define "monolith.serveMounts" -}}
- {name: model, mountPath: {{ .Values.modelDir.path }}, readOnly: true}
- {name: tls, mountPath: /etc/monolith/tls, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "monolith.serveVolumes" -}}
- name: model
  persistentVolumeClaim: {claimName: {{ include "monolith.modelClaim" . }}}
- name: tls
  secret: {secretName: {{ include "monolith.tlsSecret" . }}, defaultMode: 0440}
- {name: tmp, emptyDir: {}}
{{- end }}
