//! Many processes, each with what was put to it.

use super::*;

/// Many that each keep what is put to them; by chance it is always this.
struct Many(u128);

#[async_trait]
impl Keepers for Many {
    fn are_many(&self) -> bool {
        true
    }

    async fn all(&self) -> Result<Vec<(SessionId, String)>> {
        Ok(vec![(SessionId(7), "here".to_owned()), (SessionId(8), "there".to_owned())])
    }

    async fn reach(&self, _folder: &str, _version: &Version, _own: SessionId) -> Result<Reached> {
        Ok(Reached::default())
    }
}

impl Environment for Many {
    fn now(&self) -> Timestamp {
        Timestamp(0)
    }

    fn random(&self) -> u128 {
        self.0
    }
}

#[tokio::test]
async fn a_process_is_found_from_when_it_enters_until_it_leaves() {
    let ledgers = SharedLedgers::new(Arc::new(MemoryMeta::default()));
    let (shared, volume) = (Arc::new(ledgers.clone()), Arc::new(MemoryVolume::default()));
    let controller = LocalController::among(shared, volume, Arc::new(Many(7)), Arc::new(Many(7)));
    let own = SessionId(7);
    assert!(ledgers.has_ended(own).await.unwrap());
    controller.enter().await.unwrap();
    assert!(!ledgers.has_ended(own).await.unwrap());
    let hosts = controller.hosts().await.unwrap();
    let hosts: Vec<_> = hosts.iter().map(|it| (it.address.as_str(), it.is_own)).collect();
    assert_eq!(hosts, [("here", true), ("there", false)]);
    controller.leave().await;
    assert!(ledgers.has_ended(own).await.unwrap());
    // What is put to somebody who is not found is lost for all others.
    let (key, proposal) = (Key::new("policy").unwrap(), Proposal::alone(1, Durability::Memory));
    let error = controller.open(&key, &proposal, || true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let patient = Proposal { timeout: Duration::from_mins(1), ..proposal };
    let mut open = std::pin::pin!(controller.open(&key, &patient, || true));
    tokio::time::timeout(Duration::from_millis(20), &mut open).await.unwrap_err();
    let _found = ledgers.session(own).await.unwrap();
    open.await.unwrap();
}

#[tokio::test]
async fn what_is_here_of_what_others_keep_is_said_and_what_is_not_here_any_more() {
    let (ledgers, volume) =
        (SharedLedgers::new(Arc::new(MemoryMeta::default())), MemoryVolume::default());
    let among = |own| {
        let (ledgers, volume) = (Arc::new(ledgers.clone()), Arc::new(volume.clone()));
        LocalController::among(ledgers, volume, Arc::new(Many(own)), Arc::new(Many(own)))
    };
    let (shared, kept) = (Arc::new(ledgers.clone()), Arc::new(volume.clone()));
    let everyone = LocalController::new(shared, kept, Arc::new(SystemEnvironment));
    let (one, other) = (among(7), among(8));
    let key = Key::new("policy").unwrap();
    one.retain(&key, std::num::NonZeroU32::new(9).unwrap(), None).await.unwrap();
    let mut paths = Vec::new();
    // What anybody finds in the volume is kept by nobody.
    for (number, controller) in [(1, &one), (2, &everyone)] {
        let proposal = Proposal::alone(number, Durability::Memory);
        let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
        let (digest, len) = written(&volume, &place);
        assert!(controller.commit(&place, digest, &[len]).await.unwrap().visible);
        paths.push(place.path(0));
    }
    let keepers = async || {
        let state = everyone.state(&key).await.unwrap();
        let versions = state.visible().map(|version| {
            let of: Vec<_> =
                version.contributions.values().flat_map(Contribution::keepers).collect();
            of.iter().map(|session| session.0).collect::<Vec<_>>()
        });
        versions.collect::<Vec<_>>()
    };
    let say = async |controller: &LocalController, here: &[String]| {
        let here: BTreeSet<String> = here.iter().cloned().collect();
        controller.say_kept(&key, &|| here.clone()).await.unwrap();
        keepers().await
    };
    assert_eq!(say(&other, &[]).await, [vec![7], vec![]]);
    assert_eq!(say(&other, &paths).await, [vec![7, 8], vec![]]);
    assert_eq!(say(&other, &paths).await, [vec![7, 8], vec![]]);
    assert_eq!(say(&one, &paths).await, [vec![7, 8], vec![]]);
    assert_eq!(say(&other, &[]).await, [vec![7], vec![]]);
    // Nobody else has it: so nothing is gained by saying that it is gone.
    assert_eq!(say(&one, &[]).await, [vec![7], vec![]]);
}

#[tokio::test]
async fn what_a_process_has_begun_that_has_ended_is_taken_back() {
    let ledgers = SharedLedgers::new(Arc::new(MemoryMeta::default()));
    let volume = MemoryVolume::default();
    let among = |own| {
        let (ledgers, volume) = (Arc::new(ledgers.clone()), Arc::new(volume.clone()));
        LocalController::among(ledgers, volume, Arc::new(Many(own)), Arc::new(Many(own)))
    };
    let (one, other, key) = (among(7), among(8), Key::new("policy").unwrap());
    let proposal = Proposal::alone(1, Durability::Memory);
    let (place, _) = one.open(&key, &proposal, || true).await.unwrap();
    written(&volume, &place);
    for (is_there, left) in [(true, 1), (false, 0)] {
        if !is_there {
            one.leave().await;
        }
        other.look_after(&key).await.unwrap();
        assert_eq!(other.state(&key).await.unwrap().open().count(), left);
        assert_eq!(volume.open(&place.path(0)).unwrap().is_some(), is_there);
    }
}

#[tokio::test]
async fn nobody_is_followed_where_there_is_no_daemon() {
    let (controller, key) = (Hooked::default().controller(), Key::new("policy").unwrap());
    let unread = controller.unread(&key, 0, Duration::ZERO).await.unwrap_err();
    let follow = controller.follow(&key).await.map(drop).unwrap_err();
    assert_eq!([unread.kind(), follow.kind()], [ErrorKind::Unsupported; 2]);
    assert!(controller.is_open() && !controller.takes_devices());
}
