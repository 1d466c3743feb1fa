{{/* The name of the release, cut to 40 characters so that names with suffixes fit into the 63 of a DNS label. */}}
{{- define "monolith.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "monolith.ps" -}}{{ include "monolith.fullname" . }}-ps{{- end }}
{{- define "monolith.worker" -}}{{ include "monolith.fullname" . }}-worker{{- end }}
{{- define "monolith.shard" -}}{{ include "monolith.fullname" . }}-shard{{- end }}
{{- define "monolith.frontEnd" -}}{{ include "monolith.fullname" . }}-front-end{{- end }}
{{- define "monolith.tokenSecret" -}}{{ .Values.token.existingSecret | default (printf "%s-token" (include "monolith.fullname" .)) }}{{- end }}
{{- define "monolith.tlsSecret" -}}{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "monolith.fullname" .)) }}{{- end }}
{{- define "monolith.modelClaim" -}}{{ .Values.modelDir.existingClaim | default (printf "%s-model" (include "monolith.fullname" .)) }}{{- end }}

{{/* The part of a DNS name after the name of a pod. Takes a dict of "root" and "service". */}}
{{- define "monolith.domain" -}}
{{ .service }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end }}

{{- define "monolith.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "monolith.labels" -}}
{{ include "monolith.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
